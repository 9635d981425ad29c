"""DeepFM (Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, IJCAI 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.base import with_dense
from trainer.models.ctr_base import FirstOrderModel
from trainer.models.layers.mlp import PLAIN, TowerOptions, tower


class DeepFM(FirstOrderModel):
    """logit = sum_f w_f + <u, x> + sum over pairs f < g of <v_f, v_g> + MLP(concat of v_f, and x), equations 1 to 4.

    The pairs are pairs of fields: a list is one field, whose vector is pooled. Numeric features are first-order and
    deep.

    Parameters: (dim + 1) for each id, and of the tower [F dim + n, *hidden, 1] for F fields and n numeric features sum
    of (a + 1) b over neighbouring sizes, and n: those of Wide & Deep, as the pairs have none.
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
        super().__init__(embeddings, features, dim=dim, num_dense=num_dense, seed=seed, dtype=dtype)
        sizes = [len(self.features) * dim + num_dense, *hidden, 1]
        self.tower = tower(sizes, seed=seed, dtype=dtype, options=options)

    def forward(self, features: Any, dense: Tensor | None = None) -> Tensor:
        vectors, linear = self.vectors_and_first_order(features, dense)
        return linear + pairs(vectors) + self.tower(with_dense(vectors.flatten(1), dense)).squeeze(1)


def pairs(vectors: Tensor) -> Tensor:
    """Return sum over f < g of <v_f, v_g>, [b], from vectors [b, F, d].

    It is computed as (|sum_f v_f|^2 - sum_f |v_f|^2) / 2 (Rendle, Factorization Machines, ICDM 2010, lemma 3.1).
    """
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
