"""DNN: the plain deep CTR model. All pooled embeddings side by side -> MLP -> logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainer.models.base import Batch, RankingModel, mlp, pooled_rows


class DNN(RankingModel):
    """logit = MLP(concat of e_f over the features f), hidden sizes ``hidden``; binary cross-entropy.

    Its first layer absorbs any linear map of an item table, so its vectors are not published (methods: which vectors).
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
        self.features = tuple(features)
        self.tower = mlp([len(self.features) * dim, *hidden, 1], seed=seed, dtype=dtype)

    def forward(self, features: Any) -> Tensor:
        return self.tower(pooled_rows(self.embeddings(features), self.features)).squeeze(1)

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch.features)
        return binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype), reduction="none")
