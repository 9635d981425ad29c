"""Two towers: a tower over user and context against the item's own row. Its item vectors are made to be published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainer.models.base import Batch, RankingModel, mlp

ITEM = "item"


class TwoTower(RankingModel):
    """logit = <MLP(concat of e_f over f other than item), e_item> + c; binary cross-entropy.

    The item tower is the item's row, so the loss determines the geometry of the rows up to a rotation (and the tower's
    scale), which is what alignment between versions needs. There is one bias ``c`` for all items: an item's own
    popularity goes into its row, as it does in what a consumer of the vectors reads.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        features: Sequence[str],
        *,
        dim: int,
        hidden: Sequence[int],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.embeddings = embeddings
        self.context = tuple(name for name in features if name != ITEM)
        if len(self.context) == len(features) or not self.context:
            raise ValueError(f"two_tower needs a feature named 'item' and at least one other, not {list(features)}")
        self.tower = mlp([len(self.context) * dim, *hidden, dim], seed=seed, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, features: Any) -> Tensor:
        blocks = self.embeddings(features).to_dict()
        user = self.tower(torch.cat([blocks[name] for name in self.context], dim=1))
        return (user * blocks[ITEM]).sum(1) + self.bias

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch.features)
        return binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype), reduction="none")
