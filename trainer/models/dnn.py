"""DNN: the plain deep CTR model. All pooled embeddings and numeric features side by side -> MLP -> logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.base import Batch, RankingModel, pooled_rows, with_dense
from trainer.models.layers.mlp import PLAIN, TowerOptions, tower
from trainer.models.losses import pointwise_loss


class DNN(RankingModel):
    """logit = MLP(concat of e_f over the features f, and x, the numeric ones), with hidden sizes ``hidden``.

    The loss is ``bce``, ``mse`` or ``focal``. The first layer absorbs any linear map of an item table, so the model's
    vectors are not published.
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
        num_dense: int = 0,
        options: TowerOptions = PLAIN,
    ):
        super().__init__()
        self.embeddings = embeddings
        self.features = tuple(features)
        self.num_dense = num_dense
        self.tower = tower([len(self.features) * dim + num_dense, *hidden, 1], seed=seed, dtype=dtype, options=options)

    @staticmethod
    def settings(job: Any) -> dict[str, Any]:
        return {"options": TowerOptions.of(job)}

    def forward(self, features: Any, dense: Tensor | None = None) -> Tensor:
        rows = pooled_rows(self.embeddings(features), self.features)
        return self.tower(with_dense(rows, dense)).squeeze(1)

    def loss(self, batch: Batch) -> Tensor:
        return pointwise_loss(self.loss_kind, self.scores(batch), batch.labels, **self.loss_settings)
