"""DCN-V2: cross layers with a full or low-rank matrix (Wang et al., DCN V2, WWW 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, Axis, ModelInputs, Position, with_dense
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded, uniform
from trainer.spec.models.products import DCNv2Spec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class DCNv2(ClickModel):
    """x_0 = concat of v_f, and of the numeric features; cross layers x_{l+1} = x_0 o (W_l x_l + b_l) + x_l, equation 1.

    ``stacked``: logit = MLP(x_L), figure 1a. ``parallel``: logit = <w, [x_L | h]> + c, figure 1b, h the last hidden
    layer of the MLP on x_0. ``low_rank`` r: W_l = U_l V_l^T, equation 2, U and V [D, r]. The mixture of low-rank
    experts (equation 3) is not here.

    Parameters, D = F dim + n for F fields and n numeric features: dim for each id; each cross layer D^2 + D, or 2 D r +
    D; the tower sum of (a + 1) b over neighbouring sizes of [D, *hidden, 1], or in parallel of [D, *hidden], and D +
    hidden[-1] + 1.
    """

    def __init__(self, embeddings: nn.Module, spec: DCNv2Spec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.parallel = spec.structure == "parallel"
        with seeded(inputs.seed, "cross"):
            layers = (CrossLayer(self.width, spec.low_rank, inputs.dtype) for _ in range(spec.cross_layers))
            self.cross = nn.ModuleList(layers)
        sizes = [self.width, *spec.hidden] if self.parallel else [self.width, *spec.hidden, 1]
        self.tower = tower_of(spec, inputs, sizes, logits=not self.parallel)
        if self.parallel:
            with seeded(inputs.seed, "output"):
                self.output = nn.Linear(self.width + sizes[-1], 1, dtype=torch.float32).to(inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        inputs = self.inputs(numbers)
        reads, gives = Axis(tuple(inputs)), Axis(tuple(inputs), reads=False)
        found = super().axes(numbers)
        for number, layer in enumerate(self.cross):
            *_, last = maps = [f"cross.{number}.maps.{one}" for one in range(len(layer.maps))]  # type: ignore[arg-type]
            found |= {maps[0]: {1: reads}, f"cross.{number}.bias": {0: gives}}
            found[last] = {**found.get(last, {}), 0: gives}
        if self.parallel:
            hidden = [((), column) for column in range(self.output.in_features - len(inputs))]
            found["output.weight"] = {1: Axis((*inputs, *hidden))}
        return found

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        first = with_dense(self.vectors(features, dense).flatten(1), self.numbers(dense))
        x = first
        for layer in self.cross:
            x = layer(first, x)
        if not self.parallel:
            return self.tower(x).squeeze(1)
        return self.output(torch.cat([x, self.tower(first)], dim=1)).squeeze(1)


class CrossLayer(nn.Module):
    """(x_0, x) [b, D] -> x_0 o (W x + b) + x, W = U V^T where a rank is given."""

    def __init__(self, width: int, rank: int | None, dtype: torch.dtype):
        super().__init__()
        if rank is None:
            self.maps = nn.ParameterList([uniform(width, width, inputs=width, dtype=dtype)])
        else:
            down, up = uniform(rank, width, inputs=width, dtype=dtype), uniform(width, rank, inputs=rank, dtype=dtype)
            self.maps = nn.ParameterList([down, up])
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        h = x
        for weight in self.maps:
            h = h @ weight.T
        return first * (h + self.bias) + x
