"""AutoInt: self-attention over fields.

Song et al., AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks, CIKM 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, Axis, ModelInputs, Position, RowColumn, columns_of
from trainer.models.ctr_base import ClickModel, NumericFields
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded, uniform
from trainer.spec.models.autoint import AutoIntSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class AutoInt(ClickModel):
    """logit = <w, concat of e_m^L> + MLP(concat of e_m), e^0 = e, and e^1 .. e^L by an :class:`InteractingLayer` each.

    The fields e_m are pooled rows, and x_j v_j for numeric features (equation 4). With an MLP the model is AutoInt+
    (section 5.5), and the bias b is that of the MLP's last layer. If ``hidden`` is empty there is no MLP, and the logit
    is <w, ..> + b (equation 9). Rows of zeros then learn only if there is a numeric feature, since ReLU passes no
    gradient at 0.

    Number of parameters for M = F + n fields and k = heads times units. L(sizes) is the sum of (a + 1) b over
    neighbouring sizes a, b.

    - rows: dim for each id
    - vectors of numeric features: n dim
    - interacting layers: 4 dim k for the first, 4 k^2 for each later layer
    - w: M k
    - MLP: L([M dim, *hidden, 1]); without MLP 1 for b
    """

    def __init__(self, embeddings: nn.Module, spec: AutoIntSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        heads, units = spec.attention_heads, spec.attention_units
        self.numeric = NumericFields(self.dim, inputs) if self.num_dense else None
        with seeded(inputs.seed, "attention"):
            self.attention = nn.ModuleList(
                InteractingLayer(heads * units if number else self.dim, heads, units, inputs.dtype)
                for number in range(spec.attention_layers)
            )
        num_fields = len(self.features) + self.num_dense
        self.tower = tower_of(spec, inputs, [num_fields * self.dim, *spec.hidden, 1]) if spec.hidden else None
        with seeded(inputs.seed, "output"):
            output = nn.Linear(num_fields * heads * units, 1, bias=self.tower is None, dtype=torch.float32)
        self.output = output.to(inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        def fields(count: int) -> list[Position]:
            of_numbers = ((of, RowColumn((number, column))) for of, number in numbers for column in range(count))
            return [*columns_of(self.features, count), *of_numbers]

        units = self.output.in_features // (len(self.features) + len(numbers))
        found = self.making_vectors() | self.reading(fields(self.dim), "tower")
        columns = Axis(tuple(((), RowColumn(column)) for column in range(self.dim)))
        found |= {"output.weight": {1: Axis(tuple(fields(units)))}, "attention.0.maps": {1: columns}}
        return found | ({} if self.numeric is None else self.numeric.axes(numbers))

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        fields = self.vectors(features, dense)
        numbers = self.numbers(dense)
        if self.numeric is not None and numbers is not None:
            fields = torch.cat([fields, self.numeric(numbers)], dim=1)
        x = fields
        for layer in self.attention:
            x = layer(x)
        logit = self.output(x.flatten(1))
        return (logit if self.tower is None else logit + self.tower(fields.flatten(1))).squeeze(1)


class InteractingLayer(nn.Module):
    """Multi-head self-attention over fields: e [b, M, d] -> [b, M, heads units], equations 5 to 8.

    The output is relu(concat over heads of sum_k a_mk W_V e_k, + W_R e_m), with a_m = softmax over k of
    <W_Q e_m, W_K e_k>, not divided by the root of the units.
    """

    def __init__(self, width: int, heads: int, units: int, dtype: torch.dtype):
        super().__init__()
        self.sizes = (4, heads, units)
        # Rows of W_Q, W_K, W_V and W_R, each in the order of heads.
        self.maps = uniform(4 * heads * units, width, inputs=width, dtype=dtype)

    def forward(self, fields: Tensor) -> Tensor:
        parts = (fields @ self.maps.T).unflatten(2, self.sizes).permute(2, 0, 3, 1, 4)
        query, key, value, residual = parts.unbind(0)  # each [b, heads, M, units]
        # Written out, because dropout regularizers may differentiate it twice.
        weights = (query @ key.transpose(2, 3)).softmax(3)
        return (weights @ value + residual).relu().transpose(1, 2).flatten(2)
