"""Wukong: stacked factorization machines.

Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation, ICML 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, Axis, ModelInputs, Position, columns_of, mlp
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded, uniform
from trainer.models.products import NUMBERS
from trainer.spec.models.wukong import WukongSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class Wukong(ClickModel):
    """X_0 [F, d] the fields' vectors; interaction layers; logit = MLP(flattened X_L).

    X_{i+1} = LN([FMB_i(X_i) | LCB_i(X_i)] + X_i), LN over d: ``fm_vectors`` rows of the factorization machine block and
    ``linear_vectors`` of the linear compression block. Numeric features are one more vector, by an MLP [n, *hidden, d].

    Number of parameters for F fields (with that vector), a = ``fm_vectors``, c = ``linear_vectors``, k = ``fm_rank``.
    L(sizes) is the sum of (p + 1) q over neighbouring sizes p, q. m, the number of vectors that a layer reads, is F for
    the first layer, a + c for later layers.

    - rows: dim for each id
    - MLP of the numeric features: L([n, *hidden, d])
    - LCB of a layer: c m
    - FMB of a layer: m k for the projection, 2 m k for its LN, L([m k, *fm_hidden, a d])
    - rest of a layer: 2 d for LN; (a + c) m for the shortcut if m differs from a + c
    - last MLP: L([(a + c) d, *hidden, 1])
    """

    def __init__(self, embeddings: nn.Module, spec: WukongSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        if self.dim < 2:
            raise ValueError("wukong normalises each vector, which leaves nothing of one column: use embedding_dim 2")
        num_vectors, seed, dtype = len(self.features) + bool(self.num_dense), inputs.seed, inputs.dtype
        sizes = [self.num_dense, *spec.hidden, self.dim]
        self.bottom = mlp(sizes, seed=seed + 1, dtype=dtype) if self.num_dense else None
        layers: list[nn.Module] = []
        for number in range(spec.interaction_layers):
            with seeded(seed, f"interaction {number}"):
                layers.append(InteractionLayer(spec, num_vectors, dtype))
            num_vectors = spec.fm_vectors + spec.linear_vectors
        self.layers = nn.Sequential(*layers)
        self.tower = tower_of(spec, inputs, [num_vectors * self.dim, *spec.hidden, 1])

    def axes(self, numbers: Sequence[Position]) -> Axes:
        fields = [*self.features, *([NUMBERS] if self.num_dense else [])]
        rank = self.layers[0].compressed.shape[1]  # type: ignore[union-attr,index]
        one, all_ranks = Axis(tuple(columns_of(fields, 1))), tuple(columns_of(fields, int(rank)))
        return self.reading(numbers, "bottom") | {
            "layers.0.compressed": {0: one},
            "layers.0.linear": {1: one},
            "layers.0.shortcut": {1: one},
            "layers.0.before.weight": {0: Axis(all_ranks, reads=False)},
            "layers.0.before.bias": {0: Axis(all_ranks, reads=False)},
            "layers.0.network.0.weight": {1: Axis(all_ranks)},
        }

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors = self.vectors(features, dense)
        numbers = self.numbers(dense)
        if self.bottom is not None and numbers is not None:
            vectors = torch.cat([vectors, self.bottom(numbers.to(vectors.dtype)).unsqueeze(1)], dim=1)
        return self.tower(self.layers(vectors).flatten(1)).squeeze(1)


class InteractionLayer(nn.Module):
    """X [b, n, d] -> LN([FMB(X) | LCB(X)] + X) [b, fm_vectors + linear_vectors, d].

    FMB(X) = reshape(MLP(LN(flatten(X (X^T Y))))): the products of all pairs, compressed by a learned Y [n, rank]
    (section 3.5). LCB(X) = W_L X (section 3.4). Where n is not the number of vectors out, W_R X replaces the X that is
    added.
    """

    def __init__(self, spec: WukongSpec, num_vectors: int, dtype: torch.dtype):
        super().__init__()
        rank, linear_vectors, outputs = spec.fm_rank, spec.linear_vectors, spec.fm_vectors + spec.linear_vectors
        self.compressed = uniform(num_vectors, rank, inputs=num_vectors, dtype=dtype)
        self.linear = uniform(linear_vectors, num_vectors, inputs=num_vectors, dtype=dtype)
        self.shortcut = (
            None if outputs == num_vectors else uniform(outputs, num_vectors, inputs=num_vectors, dtype=dtype)
        )
        self.before = nn.LayerNorm(num_vectors * rank, dtype=dtype)
        sizes = [num_vectors * rank, *spec.fm_hidden, spec.fm_vectors * spec.embedding_dim]
        self.network = mlp(sizes, seed=int(torch.randint(2**32, ())), dtype=dtype)
        self.after = nn.LayerNorm(spec.embedding_dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        products = x @ (x.transpose(1, 2) @ self.compressed)  # [b, n, rank]
        compressed = self.network(self.before(products.flatten(1))).unflatten(1, (-1, x.shape[2]))
        added = x if self.shortcut is None else self.shortcut @ x
        return self.after(torch.cat([compressed, self.linear @ x], dim=1) + added)
