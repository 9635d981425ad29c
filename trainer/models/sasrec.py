"""SASRec: self-attention over a user's last items (Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM
2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softplus

from trainer.models.base import Batch
from trainer.models.dropout import keep_mask
from trainer.models.next_item import ITEM, NEGATIVE, TARGET, NextItemModel, by_owner, owners, padded


class SASRec(NextItemModel):
    """score(i | s_1 .. s_t) = <M_i, F_t>, F = LayerNorm(block(.. block(sqrt(d) M_s + P) ..)), M the item table.

    A block is x + Dropout(Attention(LayerNorm(x))), then x + Dropout(FFN(LayerNorm(x))) (section 3.3): causal attention
    softmax(Q K^T / sqrt(d)) V with Q, K, V = x W (equation 2, no bias, no output map) and FFN(x) = W2 relu(W1 x + b1) +
    b2 (equation 4). Positions are counted from the end, ``length`` at most. M is shared by input and output and is what
    is published. Parameters: |I| d + n d + blocks (3 d^2 + 2 (d^2 + d) + 4 d) + 2 d: items, positions, attention and
    FFN with a LayerNorm before each, the last LayerNorm.

    loss, by ``loss``, the sum over the positions of a sample divided by ``length``:
      bce: -log sigmoid(<M_o, F_t>) - sum_k log(1 - sigmoid(<M_k, F_t>)), equation 7;
      sampled_softmax: -<M_o, F_t> + log sum over o and the k of exp(<M_., F_t>). The k are uniform, so that logQ is one
      number for all and cancels.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        features: Sequence[str],
        *,
        dim: int,
        hidden: Sequence[int] = (),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        length: int = 50,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.0,
        loss: str = "bce",
    ):
        super().__init__()
        self._check("sasrec", features)
        if dim % heads:
            raise ValueError(f"sasrec: {heads} heads do not divide {dim} columns: use a divisor of embedding_dim")
        self.embeddings = embeddings
        self.dim, self.length, self.seed, self.dropout, self.kind = dim, length, seed, dropout, loss
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.positions = nn.Parameter((0.02 * torch.randn(length, dim)).to(dtype))
            self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks)).to(dtype)
        self.last = nn.LayerNorm(dim, dtype=dtype)

    @staticmethod
    def settings(job: Any) -> dict[str, Any]:
        model = job.model
        return {
            "length": model.length, "blocks": model.blocks, "heads": model.heads, "loss": model.loss,
            "dropout": job.regularizers.dropout,
        }  # fmt: skip

    def loss(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch.features)
        states = self._states(rows, batch)  # [n, d], n the targets of all samples
        targets, negatives = rows[TARGET].values(), by_owner(rows[NEGATIVE].values(), len(states))
        positive = (states * targets).sum(1)
        negative = torch.einsum("nd,nkd->nk", states, negatives)
        if self.kind == "bce":
            terms = softplus(-positive) + softplus(negative).sum(1)
        else:
            terms = torch.cat([positive[:, None], negative], dim=1).logsumexp(1) - positive
        lengths = rows[ITEM].lengths()
        return terms.new_zeros(len(lengths)).index_add(0, owners(lengths), terms) / self.length

    def encode(self, items: Tensor, lengths: Tensor) -> Tensor:
        states = self._hidden(items, lengths, None)
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, -1, self.dim)
        return self.last(states.gather(1, last).squeeze(1)) * (lengths > 0)[:, None]

    def candidates(self, rows: Tensor) -> Tensor:
        return rows

    def _states(self, rows: Any, batch: Any) -> Tensor:
        """F of every item read, [number of ids, d]; with dropout where the model trains."""
        lengths, values = rows[ITEM].lengths(), rows[ITEM].values()
        if not len(values):
            # A rank without a sample: a part of the graph all the same, so that backward finds it.
            return self.last(values)
        owner = owners(lengths)
        place = torch.arange(len(values), device=values.device) - (lengths.cumsum(0) - lengths)[owner]
        return self.last(self._hidden(padded(values, lengths), lengths, batch)[owner, place])

    def _hidden(self, items: Tensor, lengths: Tensor, batch: Any) -> Tensor:
        """The output of the last block [b, l, d]. Items stand at the left, so that the causal mask hides the padding
        behind them. With dropout where there is a ``batch`` and the model trains."""
        columns = torch.arange(items.shape[1], device=items.device)
        positions = (self.length - lengths[:, None] + columns).clamp(max=self.length - 1)
        x = items * self.dim**0.5 + self.positions[positions]
        drop = self._dropout(batch, positions)
        x = drop(x, 0)
        for number, block in enumerate(self.blocks):
            x = block(x, drop, 2 * number + 1)
        return x

    def _dropout(self, batch: Any, positions: Tensor) -> Any:
        if batch is None or not self.training or not self.dropout:
            return lambda x, site: x
        where = {"seed": self.seed, "step": batch.step, "sample_offset": batch.sample_offset}

        def drop(x: Tensor, site: int) -> Tensor:
            keep = keep_mask(positions, self.dim, self.dropout, site=site, **where)
            return x * keep * (1.0 / (1.0 - self.dropout))

        return drop


class Block(nn.Module):
    """Causal self-attention and a pointwise network, each of the LayerNorm of its input [b, l, d]."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.before_network = nn.LayerNorm(dim)
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: Tensor, drop: Callable[[Tensor, int], Tensor], site: int) -> Tensor:
        """``drop(part, site)`` is the dropout of what is added at ``site`` and the one after it."""
        x = x + drop(self.attend(x), site)
        return x + drop(self.transform(x), site + 1)

    def attend(self, x: Tensor) -> Tensor:
        size, length, dim = x.shape
        parts = self.query_key_value(self.before_attention(x)).view(size, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [b, heads, l, d / heads]
        return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape)

    def transform(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.before_network(x)).relu())
