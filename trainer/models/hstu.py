"""HSTU: gated attention without a softmax over a user's last items.

Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations,
ICML 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, silu

from trainer.models.base import ModelInputs
from trainer.models.causal_sequence import CausalSequenceModel, Drop, at
from trainer.models.layers.seeded_init import seeded
from trainer.spec.models.sequences import HSTUSpec


class HSTU(CausalSequenceModel):
    """score(i | s_1 .. s_t) = <M_i, F_t>, F = LayerNorm(layer(.. layer(sqrt(d) M_s + P) ..)), M the item table.

    A layer (section 3, equations 1 to 3), N a LayerNorm without weights, is x + Dropout(W2 (N(A V) o U) + b2) with
    U, V, Q, K = silu(W1 N(x) + b1) and A_ts = silu(<Q_t, K_s> + r_{t-s}) / ``length`` for s <= t, else 0, in each head.
    r is the relative attention bias of positions, a number for each distance; the bias of times is not implemented.
    Positions P, the last LayerNorm and the losses are as in sasrec.

    Number of parameters with n = ``length``:

    - rows of items: |I| d
    - positions: n d
    - each block: 4 (d^2 + d) for U, V, Q, K, d^2 + d for W2 and b2, n for r
    - last LayerNorm: 2 d
    """

    def __init__(self, embeddings: nn.Module, spec: HSTUSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        with seeded(inputs.seed, "hstu"):
            self.positions = nn.Parameter((0.02 * torch.randn(spec.length, self.dim)).to(inputs.dtype))
            layers = (GatedAttention(self.dim, spec.heads, spec.length) for _ in range(spec.blocks))
            self.layers = nn.ModuleList(layers).to(inputs.dtype)
        self.last = nn.LayerNorm(self.dim, dtype=inputs.dtype)

    def hidden(self, items: Tensor, positions: Tensor, drop: Drop, only: Tensor | None = None) -> Tensor:
        x = drop(items * self.dim**0.5 + embedding(positions, self.positions), 0)
        for number, layer in enumerate(self.layers, 1):
            places = only if number == len(self.layers) else None
            x = (x if places is None else at(x, places)) + drop(layer(x, places), number)
        return x

    def finished(self, states: Tensor) -> Tensor:
        normed: Tensor = self.last(states)
        return normed


class GatedAttention(nn.Module):
    """Attention branch of a layer, added to the layer's input [b, l, dim]; l is ``length`` at most."""

    def __init__(self, dim: int, heads: int, length: int):
        super().__init__()
        self.dim, self.heads, self.length = dim, heads, length
        self.first = nn.Linear(dim, 4 * dim)
        self.second = nn.Linear(dim, dim)
        self.distance_bias = nn.Parameter(0.02 * torch.randn(length))

    def forward(self, x: Tensor, only: Tensor | None = None) -> Tensor:
        """Return the branch's output for x [b, l, dim], or only at the places ``only`` [b, 1] if they are given."""
        gate, value, query, key = silu(self.first(layer_norm(x, (self.dim,)))).split(self.dim, dim=2)
        places = torch.arange(x.shape[1], device=x.device)
        distances = places[:, None] - places  # [l, l]; below 0 for what comes later
        if only is not None:
            gate, query = at(gate, only), at(query, only)
            distances = (only - places)[:, None, None]  # [b, 1, 1, l]
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        scores = silu(query @ key.transpose(2, 3) + self.distance_bias[distances.clamp(min=0)])
        attended = scores.masked_fill(distances < 0, 0.0) @ value / self.length  # [b, heads, l, dim / heads]
        mixed: Tensor = self.second(layer_norm(attended.transpose(1, 2).flatten(2), (self.dim,)) * gate)
        return mixed
