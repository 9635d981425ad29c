"""Sending of pooled rows of whole tables and column shards to the ranks whose samples need them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.types import NoWait

from embeddings.sharding.exchange.collectives import all_to_all


class PooledDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """[samples of all ranks, D of this rank] on each rank -> [own samples, D of all ranks].

    D is a number of columns. TorchRec's own class makes one more copy of the tensors sent, and one of those received.

    Args:
        dim_by_rank: number of columns of each rank.
        dims: number of columns of each block (feature of a table), rank by rank.
        order: positions of the blocks in the output.
    """

    def __init__(
        self, group: dist.ProcessGroup, dim_by_rank: Sequence[int], dims: Sequence[int], order: Sequence[int]
    ) -> None:
        super().__init__()
        self._group, self._dim_by_rank, self._dims = group, list(dim_by_rank), list(dims)
        self._set_order(order)

    def sort(self, names: Sequence[str], order: Sequence[str]) -> None:
        """Set the order of the output's blocks to ``order``; ``names`` are the block names, rank by rank."""
        position = {name: number for number, name in enumerate(order)}
        self._set_order(sorted(self._order, key=lambda block: position[names[block]]))

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> NoWait[Tensor]:
        assert sharding_ctx is not None
        return NoWait(self.exchange(local_embs, list(sharding_ctx.batch_size_per_rank)))

    def exchange(self, local_embs: Tensor, batch_sizes: list[int]) -> Tensor:
        if len(self._dim_by_rank) == 1 and self._sources == [(0, 0, self._dim_by_rank[0])]:
            return local_embs
        return PooledExchange.apply(local_embs, batch_sizes, self)

    def _set_order(self, order: Sequence[int]) -> None:
        self._order = list(order)
        ends = list(itertools.accumulate(self._dim_by_rank, initial=0))
        starts = list(itertools.accumulate(self._dims, initial=0))
        ranks = [max(rank for rank, end in enumerate(ends[:-1]) if end <= start) for start in starts[:-1]]
        # Source of each output block: (rank, its first column there, end).
        at = [(ranks[b], starts[b] - ends[ranks[b]], starts[b + 1] - ends[ranks[b]]) for b in self._order]
        outputs = list(itertools.accumulate((self._dims[b] for b in self._order), initial=0))
        self._sources = _merged(at)
        self._targets = [
            [
                (start, end)
                for _, start, end in _merged(
                    (0, outputs[i], outputs[i + 1])
                    for i in sorted(range(len(at)), key=lambda i: at[i])
                    if at[i][0] == rank
                )
            ]
            for rank in range(len(self._dim_by_rank))
        ]

    def _send(self, pooled: Tensor, batch_sizes: list[int]) -> Tensor:
        local = batch_sizes[dist.get_rank(self._group)]
        shapes = [(local, dim) for dim in self._dim_by_rank]
        received = all_to_all("pooled", pooled.split(batch_sizes), shapes, self._group)
        return torch.cat([received[rank][:, start:end] for rank, start, end in self._sources], dim=1)

    def _send_back(self, grad: Tensor, batch_sizes: list[int]) -> Tensor:
        local = self._dim_by_rank[dist.get_rank(self._group)]
        # An empty block stands for a rank without columns.
        parts = [[grad[:, start:end] for start, end in blocks] or [grad[:, :0]] for blocks in self._targets]
        return torch.cat(all_to_all("pooled gradients", parts, [(size, local) for size in batch_sizes], self._group))


class PooledExchange(torch.autograd.Function):
    """All-to-all that trades all samples of some columns for own samples of all columns; backward reverses it."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, batch_sizes: list[int], way: PooledDist) -> Tensor:
        ctx.batch_sizes, ctx.way = batch_sizes, way
        return way._send(pooled, batch_sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.way._send_back(grad, ctx.batch_sizes), None, None


def _merged(runs: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the runs (where, start, end), joining each run to the run before if it starts where that run ends."""
    merged: list[tuple[int, int, int]] = []
    for where, start, end in runs:
        if merged and merged[-1][0] == where and merged[-1][2] == start:
            merged[-1] = (where, merged[-1][1], end)
        else:
            merged.append((where, start, end))
    return merged
