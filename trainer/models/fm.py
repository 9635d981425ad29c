"""FM, the factorization machine alone (Rendle, Factorization Machines, ICDM 2010)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, ModelInputs, Position
from trainer.models.ctr_base import FirstOrderModel, NumericFields
from trainer.models.deepfm import pairs
from trainer.spec.models.fm import FMSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class FM(FirstOrderModel):
    """logit = w_0 + sum_f w_f + <u, x> + sum over pairs f < g of <v_f, v_g>, equation 1 for degree 2.

    The pairs are pairs of fields: single ids; lists, each one pooled vector; and numeric features j, of vector x_j v_j.
    Rows of zeros have no gradient but that of w_f, unless there is a numeric feature: all other terms are products.

    Parameters: (dim + 1) for each id; 1 + n + n dim for w_0, u and the vectors of n numeric features.
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
        vectors, linear = self.vectors_and_first_order(features, dense)
        numbers = self.numbers(dense)
        if self.numeric is not None and numbers is not None:
            vectors = torch.cat([vectors, self.numeric(numbers)], dim=1)
        return self.bias + linear + pairs(vectors)
