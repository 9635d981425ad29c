"""BPR: matrix factorization trained on pairs (Rendle et al., Bayesian Personalized Ranking, UAI 2009)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.models.base import ModelInputs, RankingModel
from trainer.models.losses import of_all_ranks
from trainer.models.retrieval_losses import RETRIEVAL, Shared, log_draw_probabilities, shared_loss
from trainer.spec.models.pairs import PartnerSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData

USER, ITEM, NEGATIVE = "user", "item", "item__negative"


class BPR(RankingModel):
    """score(u, i) = <e_u, e_i> + b_i; loss = -log sigmoid(score(u, i) - score(u, j)), j the batch's ``item__negative``.

    With ``normalize`` score(u, i) = <e_u, e_i> / (|e_u| |e_i|) + b_i, and with loss cosine_contrastive there is no b_i.
    Scores are divided by ``temperature``. If negatives are shared, each sample is compared with the negatives of all
    samples of the batch (trainer.models.retrieval_losses).

    ``b_i`` is one more column at the end of the item's row, so table ``item`` has ``dim + 1`` columns. The bias learns
    an item's popularity, so that its vector, the first ``dim`` columns, does not have to. There are no dense
    parameters.
    """

    targets = (ITEM, NEGATIVE)

    def __init__(self, embeddings: nn.Module, spec: PartnerSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        missing = {USER, ITEM, NEGATIVE} - set(self.features)
        if missing:
            raise ValueError(f"bpr needs the features user, item and item__negative: {sorted(missing)} missing")
        self.spec, self.log_q, self.num_items = spec, torch.zeros(0), 0

    def begin(self, data: PreparedData) -> None:
        if self.spec.shares:
            counts = data.example_counts("item")
            self.num_items = int((counts[NUM_SPECIAL_ROWS:] > 0).sum())
            if self.loss_kind == "sampled_softmax":
                self.log_q = log_draw_probabilities(counts, self.spec.sampling, self.spec.negative_power)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return scores of the batch's items, [b]: positives in training, the labelled items in evaluation."""
        return self._scores(features)[0]

    def loss(self, batch: Batch) -> Tensor:
        if self.spec.shares:
            return self._shared_loss(batch)
        positive, negative = self._scores(batch.features)
        return -logsigmoid(positive - negative)

    def _shared_loss(self, batch: Batch) -> Tensor:
        blocks = self.looked_up(batch.features)
        user, item = self._user(blocks[USER]), self._item(blocks[ITEM])
        negatives = of_all_ranks(self._item(blocks[NEGATIVE]), batch.global_size)
        ids, target_ids = (batch.features[name].values() for name in (NEGATIVE, ITEM))
        ids = of_all_ranks(ids, batch.global_size)
        target, offsets = (user * item).sum(1), None
        if len(self.log_q):
            log_q = self.log_q.to(ids.device, target.dtype)
            offsets, target = -log_q[ids], target - log_q[target_ids]
        loss = RETRIEVAL[self.loss_kind](self.loss_settings, self.num_items)
        return shared_loss(loss, user, target, Shared(negatives, ids, target_ids, offsets))

    def user_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        return self._user(self.looked_up(features)[USER])

    def item_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        return self._item(self.looked_up(features)[ITEM])

    def looked_up(self, features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
        """Return {feature: vectors of its ids in the batch [b, columns]}."""
        blocks: Mapping[str, Tensor] = self.embeddings(features).to_dict()
        return blocks

    def _user(self, rows: Tensor) -> Tensor:
        vectors = normalize(rows, dim=1) if self.spec.normalize else rows
        if self.spec.has_item_bias:
            vectors = torch.cat([vectors, torch.ones_like(rows[:, :1])], dim=1)
        return vectors / self.spec.temperature

    def _item(self, rows: Tensor) -> Tensor:
        if not self.spec.normalize:
            return rows
        vectors = normalize(rows[:, : self.dim], dim=1)
        return torch.cat([vectors, rows[:, self.dim :]], dim=1) if self.spec.has_item_bias else vectors

    def _scores(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        blocks = self.looked_up(features)
        if self.spec.normalize or not self.spec.has_item_bias:
            user = self._user(blocks[USER])
            positive, negative = ((user * self._item(blocks[name])).sum(1) for name in (ITEM, NEGATIVE))
            return positive, negative
        user = blocks[USER]
        positive, negative = (
            ((user * row[:, : self.dim]).sum(1) + row[:, self.dim]) / self.spec.temperature
            for row in (blocks[ITEM], blocks[NEGATIVE])
        )
        return positive, negative
