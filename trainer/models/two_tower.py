"""Two towers: a tower over user and context against the item's own row. Its item vectors are made to be published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from trainer.models.base import ModelInputs, RankingModel
from trainer.models.layers.mlp import tower_of
from trainer.models.losses import in_batch_softmax
from trainer.spec.models.two_tower import TwoTowerSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData

ITEM = "item"


class TwoTower(RankingModel):
    """logit = <MLP(concat of e_f over f other than item), e_item> + c.

    The loss is ``bce``, ``mse``, or ``sampled_softmax`` over the items of the batch
    (trainer.models.losses.in_batch_softmax), which does not train c.

    The item tower is the item's row, so the loss determines the geometry of the rows up to a rotation (and the tower's
    scale), which alignment between versions needs. There is one bias ``c`` for all items: an item's own popularity goes
    into its row, and so into the vectors that a consumer reads.
    """

    def __init__(self, embeddings: nn.Module, spec: TwoTowerSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.context = tuple(name for name in self.features if name != ITEM)
        if len(self.context) == len(self.features) or not self.context:
            names = list(self.features)
            raise ValueError(f"two_tower needs a feature named 'item' and at least one other, not {names}")
        self.tower = tower_of(spec, inputs, [len(self.context) * self.dim, *spec.hidden, self.dim])
        self.bias = nn.Parameter(torch.zeros((), dtype=inputs.dtype))
        # No buffer: it is of the data, not of the model, and a warm start on other data has its own.
        self.log_probabilities = torch.zeros(0, dtype=inputs.dtype)

    def begin(self, data: PreparedData) -> None:
        """Compute log Q of each row of the item table, Q the share of training examples of that item.

        Every example counts, whatever its label.
        """
        if self.loss_kind != "sampled_softmax":
            return
        key = next(key for key in data.keys if key.name == ITEM)
        counts = np.bincount(data.column("train", key), minlength=data.tables[key.table].num_rows)
        probabilities = counts / max(counts.sum(), 1)
        # A row without an example is in no batch.
        logs = np.log(probabilities, out=np.zeros(len(counts)), where=counts > 0)
        self.log_probabilities = torch.from_numpy(logs).to(self.log_probabilities.dtype)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        user, item = self.towers(features)
        return (user * item).sum(1) + self.bias

    def towers(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the user's tower and the item's row, each [b, dim]."""
        blocks = self.embeddings(features).to_dict()
        return self.tower(torch.cat([blocks[name] for name in self.context], dim=1)), blocks[ITEM]

    def user_side(self, features: KeyedJaggedTensor) -> Tensor:
        return self.towers(features)[0]

    def item_side(self, features: KeyedJaggedTensor) -> Tensor:
        return self.towers(features)[1]

    def loss(self, batch: Batch) -> Tensor:
        if self.loss_kind != "sampled_softmax":
            return self.label_losses(self(batch.features), batch)
        ids = batch.features[ITEM].values()
        if self.log_probabilities.device != ids.device:
            self.log_probabilities = self.log_probabilities.to(ids.device)
        return in_batch_softmax(
            *self.towers(batch.features), batch.labels, self.log_probabilities[ids],
            batch.sample_offset, batch.global_size,
        )  # fmt: skip
