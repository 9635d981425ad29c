"""FinalMLP: two MLPs of differently gated features, fused by products.

Mao et al., FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction, AAAI 2023.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, Axis, ModelInputs, Position, columns_of, with_dense
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded, uniform
from trainer.spec.models.finalmlp import FinalMLPSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class FinalMLP(ClickModel):
    """Two streams with stream-specific gating, joined by multi-head bilinear fusion.

        o_s = MLP_s(2 sigmoid(Gate_s(c_s)) o e) for streams s = 1, 2, e = concat of v_f, and of the numeric features;
        logit = b + <w, [o_1 | o_2]> + sum over heads j of o_1j^T W_j o_2j,

    o_sj being the j-th of ``fusion_heads`` equal parts of o_s. c_s is the concat of the vectors of the features that
    the gate reads (``first_gate``, ``second_gate``), or a learned vector if it reads none. All layers of MLP_s,
    ``hidden`` and ``second_hidden`` (None: ``hidden``), are hidden layers.

    Number of parameters for F fields and n numeric features, with D = F dim + n. L(sizes) is the sum of (a + 1) b over
    neighbouring sizes a, b.

    - rows: dim for each id
    - gate of each stream: L([c, *gate_hidden, D]), where c is dim times its number of features; if it reads none, c is
      dim, and the learned vector has dim more
    - MLP of each stream: L([D, *hidden])
    - fusion: h_1 + h_2 + 1 + h_1 h_2 / fusion_heads, with h_s the last size of MLP_s
    """

    def __init__(self, embeddings: nn.Module, spec: FinalMLPSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        layers = (spec.hidden, spec.hidden if spec.second_hidden is None else spec.second_hidden)
        self.gates = nn.ModuleList()
        self.streams = nn.ModuleList()
        for number, (names, sizes) in enumerate(zip((spec.first_gate, spec.second_gate), layers, strict=True)):
            with seeded(inputs.seed, f"gate {number}"):
                fields = [self.features.index(name) for name in names]
                self.gates.append(Gate(fields, self.dim, [*spec.gate_hidden, self.width], inputs.dtype))
            self.streams.append(tower_of(spec, inputs, [self.width, *sizes], number=number, logits=False))
        with seeded(inputs.seed, "fusion"):
            self.fusion = Fusion(layers[0][-1], layers[1][-1], spec.fusion_heads, inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        inputs = tuple(self.inputs(numbers))
        found = self.making_vectors() | self.reading(inputs, "streams.0", "streams.1")
        for number, gate in enumerate(self.gates):
            read = columns_of([self.features[field] for field in gate.fields], self.dim)  # type: ignore[union-attr]
            if read:
                found |= self.reading(read, f"gates.{number}.layers")
            last = f"gates.{number}.layers.{len(gate.layers) - 1}"  # type: ignore[arg-type]
            for part in ("weight", "bias"):
                found[f"{last}.{part}"] = {**found.get(f"{last}.{part}", {}), 0: Axis(inputs, reads=False)}
        return found

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors = self.vectors(features, dense)
        everything = with_dense(vectors.flatten(1), self.numbers(dense))
        first, second = (
            stream(gate(vectors) * everything) for gate, stream in zip(self.gates, self.streams, strict=True)
        )
        return self.fusion(first, second)


class Gate(nn.Module):
    """Gate of a stream: vectors [b, F, d] -> 2 sigmoid(MLP(c)) in (0, 2).

    c is the concatenation of the vectors of the fields with the given numbers, and the output is [b, sizes[-1]].
    If there are no fields, c is a learned vector, and the output is [1, sizes[-1]].
    """

    def __init__(self, fields: Sequence[int], dim: int, sizes: Sequence[int], dtype: torch.dtype):
        super().__init__()
        self.fields = list(fields)
        self.context = None if fields else uniform(dim, inputs=dim, dtype=dtype)
        inputs = [max(1, len(fields)) * dim, *sizes]
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=torch.float32) for a, b in itertools.pairwise(inputs))
        self.to(dtype)

    def forward(self, vectors: Tensor) -> Tensor:
        if self.context is not None:
            x = self.context.unsqueeze(0)  # the same for all samples
        else:
            x = torch.cat([vectors[:, field] for field in self.fields], dim=1)
        *inner, last = self.layers
        for layer in inner:
            # Not a module: dropout of hidden layers is for the streams (trainer.training.regularizers.layers).
            x = layer(x).relu()
        return 2.0 * torch.sigmoid(last(x))


class Fusion(nn.Module):
    """Bilinear fusion of two streams: (o_1 [b, p], o_2 [b, q]) -> b + <w, [o_1 | o_2]> + sum_j o_1j^T W_j o_2j [b].

    o_1j and o_2j are the j-th of ``heads`` equal parts of o_1 and o_2.
    """

    def __init__(self, first: int, second: int, heads: int, dtype: torch.dtype):
        super().__init__()
        if first % heads or second % heads:
            raise ValueError(f"finalmlp: {heads} fusion heads do not divide streams of {first} and {second} units")
        self.heads = heads
        self.linear = nn.Linear(first + second, 1, dtype=torch.float32).to(dtype)
        self.maps = uniform(heads, first // heads, second // heads, inputs=first // heads, dtype=dtype)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        linear = self.linear(torch.cat([first, second], dim=1)).squeeze(1)
        left, right = (part.unflatten(1, (self.heads, -1)).transpose(0, 1) for part in (first, second))
        return linear + (left @ self.maps * right).sum((0, 2))
