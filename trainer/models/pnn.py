"""PNN: a tower over vectors and their inner products.

Qu et al., Product-based Neural Networks for User Response Prediction, ICDM 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, ModelInputs, Position, pairs_of, with_dense
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.spec.models.products import PNNSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class PNN(ClickModel):
    """logit = MLP([e_f over the fields f | x | <e_f, e_g> for f < g]), x the numeric features.

    The first layer is the paper's l_1 = relu(l_z + l_p + b_1) of IPNN, linear and product signals, with a weight
    for each product where the paper factorizes the weights of a unit. By the linear signals rows learn from zeros.

    Parameters, for F fields and n numeric features: dim for each id, and of the tower [F dim + n + F (F - 1) / 2,
    *hidden, 1] sum of (a + 1) b over neighbouring sizes.
    """

    def __init__(self, embeddings: nn.Module, spec: PNNSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        # No buffer: it is no state. Not computed in forward: the exporter to ONNX does not know how.
        self.pairs = torch.triu_indices(len(self.features), len(self.features), 1)
        self.tower = tower_of(spec, inputs, [self.width + self.pairs.shape[1], *spec.hidden, 1])

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return self.making_vectors() | self.reading([*self.inputs(numbers), *pairs_of(self.features)], "tower")

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors = self.vectors(features, dense)
        first, second = self.pairs.to(vectors.device)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.tower(torch.cat([with_dense(vectors.flatten(1), self.numbers(dense)), products], dim=1)).squeeze(1)
