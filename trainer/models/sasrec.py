"""SASRec: self-attention over a user's last items.

Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

from trainer.models.base import ModelInputs
from trainer.models.causal_sequence import CausalSequenceModel, Drop, at
from trainer.spec.models.sequences import SASRecSpec


class SASRec(CausalSequenceModel):
    """score(i | s_1 .. s_t) = <M_i, F_t>, F = LayerNorm(block(.. block(sqrt(d) M_s + P) ..)), M the item table.

    A block is x + Dropout(Attention(LayerNorm(x))), then x + Dropout(FFN(LayerNorm(x))) (section 3.3): causal attention
    softmax(Q K^T / sqrt(d)) V with Q, K, V = x W (equation 2, no bias, no output map) and FFN(x) = W2 relu(W1 x + b1) +
    b2 (equation 4). Positions are counted from the end, ``length`` at most. ``bce`` is equation 7; the k of
    ``sampled_softmax`` are uniform, so that logQ is one number for all and cancels.

    Number of parameters with n = ``length``:

    - rows of items: |I| d
    - positions: n d
    - each block: 3 d^2 for Q, K, V, 2 (d^2 + d) for FFN, 4 d for its two LayerNorms
    - last LayerNorm: 2 d
    """

    def __init__(self, embeddings: nn.Module, spec: SASRecSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        dim, heads = self.dim, spec.heads
        if dim % heads:
            raise ValueError(f"sasrec: {heads} heads do not divide {dim} columns: use a divisor of embedding_dim")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(inputs.seed)
            self.positions = nn.Parameter((0.02 * torch.randn(spec.length, dim)).to(inputs.dtype))
            self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(spec.blocks)).to(inputs.dtype)
        self.last = nn.LayerNorm(dim, dtype=inputs.dtype)

    def hidden(self, items: Tensor, positions: Tensor, drop: Drop, only: Tensor | None = None) -> Tensor:
        """Return the output of the last block [b, l, dim]; the causal mask hides the padding."""
        x = drop(items * self.dim**0.5 + embedding(positions, self.positions), 0)
        for number, block in enumerate(self.blocks, 1):
            x = block(x, drop, 2 * number - 1, only if number == len(self.blocks) else None)
        return x

    def finished(self, states: Tensor) -> Tensor:
        normed: Tensor = self.last(states)
        return normed


class Block(nn.Module):
    """Causal self-attention and a pointwise network, each applied to the LayerNorm of its input [b, l, d]."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.before_network = nn.LayerNorm(dim)
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: Tensor, drop: Drop, site: int, only: Tensor | None = None) -> Tensor:
        """Return the block's output for x [b, l, d], or only at the places ``only`` [b, 1] if they are given.

        ``drop``: dropout of the attention's output, at place ``site``, and of the network's, at ``site`` + 1.
        """
        attended = self.attend(x, only)
        x = (x if only is None else at(x, only)) + drop(attended, site)
        return x + drop(self.transform(x), site + 1)

    def attend(self, x: Tensor, only: Tensor | None) -> Tensor:
        normed = self.before_attention(x)
        if only is None:
            query, key, value = self._heads(self.query_key_value(normed), 3)
            attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            dim = x.shape[2]
            (query,) = self._heads(linear(at(normed, only), self.query_key_value.weight[:dim]), 1)
            key, value = self._heads(linear(normed, self.query_key_value.weight[dim:]), 2)
            earlier = torch.arange(x.shape[1], device=x.device) <= only[:, :, None]  # [b, 1, l]
            attended = scaled_dot_product_attention(query, key, value, attn_mask=earlier[:, None])
        return attended.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Split x [b, l, parts d] into parts and heads: return ``parts`` tensors [b, heads, l, d / heads]."""
        return x.unflatten(2, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def transform(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.before_network(x)).relu())
