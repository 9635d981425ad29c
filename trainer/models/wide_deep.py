"""Wide & Deep (Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from trainer.models.base import with_dense
from trainer.models.ctr_base import FirstOrderTowerModel

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class WideDeep(FirstOrderTowerModel):
    """logit = sum_f w_f + <u, x> + MLP(concat of v_f, and x), equation 3; its b is that of the tower's last layer.

    The wide part reads the raw ids. Its cross-product transformations (equation 1) are engineered by hand, so here they
    are columns of the dataset, features like others, which the deep part then reads too. The paper trains the wide part
    by FTRL with L1; here the row optimizer trains both.

    Parameters: (dim + 1) for each id, and of the tower [F dim + n, *hidden, 1] for F fields and n numeric features sum
    of (a + 1) b over neighbouring sizes, and n.
    """

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors, linear = self.vectors_and_first_order(features, dense)
        return linear + self.tower(with_dense(vectors.flatten(1), self.numbers(dense))).squeeze(1)
