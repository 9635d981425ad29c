"""BPR: matrix factorization trained on pairs (Rendle et al., Bayesian Personalized Ranking, UAI 2009)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from trainer.models.base import ModelInputs, RankingModel
from trainer.spec.models.pairs import BPRSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch

USER, ITEM, NEGATIVE = "user", "item", "item__negative"


class BPR(RankingModel):
    """score(u, i) = <e_u, e_i> + b_i; loss = -log sigmoid(score(u, i) - score(u, j)), j the batch's ``item__negative``.

    ``b_i`` is one more column at the end of the item's row, so table ``item`` is ``dim + 1`` wide: popularity goes
    there and not into the direction of the item vectors, which are the first ``dim`` columns. There are no dense
    parameters.
    """

    targets = (ITEM, NEGATIVE)

    def __init__(self, embeddings: nn.Module, spec: BPRSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        missing = {USER, ITEM, NEGATIVE} - set(self.features)
        if missing:
            raise ValueError(f"bpr needs the features user, item and item__negative: {sorted(missing)} missing")

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return scores of the batch's items, [b]: positives in training, the labelled items in evaluation."""
        return self._scores(features)[0]

    def loss(self, batch: Batch) -> Tensor:
        positive, negative = self._scores(batch.features)
        return -logsigmoid(positive - negative)

    def user_side(self, features: KeyedJaggedTensor) -> Tensor:
        user = self.embeddings(features).to_dict()[USER]
        return torch.cat([user, torch.ones_like(user[:, :1])], dim=1)

    def item_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        row: Tensor = self.embeddings(features).to_dict()[ITEM]
        return row

    def _scores(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        blocks = self.embeddings(features).to_dict()
        user = blocks[USER]
        positive, negative = (
            (user * row[:, : self.dim]).sum(1) + row[:, self.dim] for row in (blocks[ITEM], blocks[NEGATIVE])
        )
        return positive, negative
