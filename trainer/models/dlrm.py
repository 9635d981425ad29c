"""DLRM: dot products of all pairs of vectors.

Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, ModelInputs, Position, pairs_of
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.spec.models.products import DLRMSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


NUMBERS = ""
"""Name of the vector of all numeric features, which no feature has."""


class DLRM(ClickModel):
    """logit = MLP([z | <e_i, e_j> for i < j]) over the fields' vectors e and z, the bottom MLP of the numeric features.

    z is one more vector in the products (section 2.5); without numeric features there is no bottom MLP, and z is left
    out.

    The bottom MLP is [n, *hidden, dim], its last layer followed by ReLU too, as in the paper's code. Without numeric
    features the logit depends on products of rows alone: rows that start from zeros get no gradient, and such a start
    is refused.

    Parameters, for F fields and n numeric features: dim for each id; the top MLP sum of (a + 1) b over neighbouring
    sizes of [F (F - 1) / 2, *hidden, 1] without numeric features, else of [dim + (F + 1) F / 2, *hidden, 1], and those
    of the bottom MLP.
    """

    def __init__(self, embeddings: nn.Module, spec: DLRMSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        num_vectors = len(self.features) + bool(self.num_dense)
        if num_vectors < 2:
            raise ValueError(f"dlrm multiplies pairs of vectors, and there is one feature, {self.features[0]}: use dnn")
        sizes = [self.num_dense, *spec.hidden, self.dim]
        self.bottom = tower_of(spec, inputs, sizes, number=1, logits=False) if self.num_dense else None
        # No buffer: it is no state. Not computed in forward: the exporter to ONNX does not know how.
        self.pairs = torch.triu_indices(num_vectors, num_vectors, 1)
        sizes = [self.pairs.shape[1] + (self.dim if self.num_dense else 0), *spec.hidden, 1]
        self.top = tower_of(spec, inputs, sizes)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        below = [NUMBERS] if self.num_dense else []
        # Columns of z are made by units, not zeros where they are new.
        units = [((name,), column) for name in below for column in range(self.dim)]
        seen = [*units, *pairs_of([*below, *self.features])]
        return self.making_vectors() | self.reading(numbers, "bottom") | self.reading(seen, "top")

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors = self.vectors(features, dense)
        seen, numbers = [], self.numbers(dense)
        if self.bottom is not None and numbers is not None:
            seen = [self.bottom(numbers.to(vectors.dtype))]
            vectors = torch.cat([seen[0].unsqueeze(1), vectors], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = self.pairs.to(products.device)
        return self.top(torch.cat([*seen, products[:, first, second]], dim=1)).squeeze(1)
