"""DeepFM (Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, IJCAI 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from trainer.models.base import with_dense
from trainer.models.ctr_base import FirstOrderTowerModel

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class DeepFM(FirstOrderTowerModel):
    """logit = sum_f w_f + <u, x> + sum over pairs f < g of <v_f, v_g> + MLP(concat of v_f, and x), equations 1 to 4.

    The pairs are pairs of fields: a list is one field, whose vector is pooled. Numeric features are first-order and
    deep.

    Parameters: (dim + 1) for each id, and of the tower [F dim + n, *hidden, 1] for F fields and n numeric features sum
    of (a + 1) b over neighbouring sizes, and n: those of Wide & Deep, as the pairs have none.
    """

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors, linear = self.vectors_and_first_order(features, dense)
        return linear + pairs(vectors) + self.tower(with_dense(vectors.flatten(1), self.numbers(dense))).squeeze(1)


def pairs(vectors: Tensor) -> Tensor:
    """Return sum over f < g of <v_f, v_g>, [b], from vectors [b, F, d].

    It is computed as (|sum_f v_f|^2 - sum_f |v_f|^2) / 2 (Rendle, Factorization Machines, ICDM 2010, lemma 3.1).
    """
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
