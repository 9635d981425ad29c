"""DNN, Wide & Deep, DeepFM, FM: a tower, a linear part, a factorization machine, alone or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, ModelInputs, Position, pooled_rows, with_dense
from trainer.models.ctr_base import ClickModel, FirstOrderModel, FirstOrderTowerModel, NumericFields
from trainer.models.layers.fused import pairs
from trainer.models.layers.mlp import tower_of
from trainer.spec.models.dnn import DNNSpec, FMSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class DNN(ClickModel):
    """logit = MLP([e_f over the features f | x]), with e_f vectors, x the numeric features, and layers ``hidden``.

    The first layer absorbs any linear map of an item table, so the model's vectors are not published.
    """

    def __init__(self, embeddings: nn.Module, spec: DNNSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.tower = tower_of(spec, inputs, [self.width, *spec.hidden, 1])

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        rows = pooled_rows(self.lookup(features, dense), self.features)
        return self.tower(with_dense(rows, self.numbers(dense))).squeeze(1)


class WideDeep(FirstOrderTowerModel):
    """logit = sum_f w_f + <u, x> + MLP(concat of v_f, and x), equation 3, whose bias b is in the MLP's last layer.

    Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016. The wide part reads the raw ids. The paper's
    cross-product transformations (equation 1) are engineered by hand: to use them, add them to the dataset as columns
    and features, which the deep part then reads too. The paper trains the wide part by FTRL with L1; this
    implementation trains both parts' rows by the row optimizer.

    Number of parameters for F fields and n numeric features. L(sizes) is the sum of (a + 1) b over neighbouring sizes
    a, b.

    - rows: dim + 1 for each id
    - u: n
    - tower: L([F dim + n, *hidden, 1])
    """

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors, linear = self.vectors_and_first_order(features, dense)
        return linear + self.tower(with_dense(vectors.flatten(1), self.numbers(dense))).squeeze(1)


class DeepFM(FirstOrderTowerModel):
    """logit = sum_f w_f + <u, x> + sum over pairs f < g of <v_f, v_g> + MLP(concat of v_f, and x), equations 1 to 4.

    Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, IJCAI 2017. The pairs are pairs
    of fields: a list is one field, whose vector is pooled. Numeric features are first-order and deep.

    It has the parameters of :class:`WideDeep`, since the pairs have none.
    """

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors, terms = self.vectors_and_terms(features, dense)
        return terms + self.tower(with_dense(vectors.flatten(1), self.numbers(dense))).squeeze(1)


class FM(FirstOrderModel):
    """logit = w_0 + sum_f w_f + <u, x> + sum over pairs f < g of <v_f, v_g>, equation 1 for degree 2.

    Rendle, Factorization Machines, ICDM 2010. The pairs are pairs of fields: single ids; lists, each one pooled vector;
    and numeric features j, with vector x_j v_j. If all rows are zeros and there is no numeric feature, only w_f has a
    gradient, since all other terms are products of rows.

    Number of parameters: dim + 1 for each id; 1 for w_0; for n numeric features n for u, and n dim for their vectors.
    """

    def __init__(self, embeddings: nn.Module, spec: FMSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        if len(self.features) + self.num_dense < 2:
            raise ValueError(f"fm multiplies pairs of fields, and there is one, {self.features[0]}: use dnn")
        self.bias = nn.Parameter(torch.zeros(1, dtype=inputs.dtype))
        self.numeric = NumericFields(self.dim, inputs) if self.num_dense else None

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return super().axes(numbers) | ({} if self.numeric is None else self.numeric.axes(numbers))

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        numbers = self.numbers(dense)
        if self.numeric is None or numbers is None:
            return self.bias + self.vectors_and_terms(features, dense)[1]
        vectors, linear = self.vectors_and_first_order(features, dense)
        return self.bias + linear + pairs(torch.cat([vectors, self.numeric(numbers)], dim=1))
