"""Exchanges for row-wise sharded tables: ids go to the ranks that hold their rows, partial sums come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, BaseSparseFeaturesDist, EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import NoWait

from embeddings.kernels.cpu import swap_feature
from embeddings.sharding.exchange.collectives import all_gather, all_to_all, sum_in_rank_order
from embeddings.sharding.exchange.ids import in_one_exchange
from embeddings.sharding.settings import StepContext, TableSettings
from embeddings.sse.swap import SwapDraws, swap_draws
from embeddings.tables.config import TableConfig


class Swapper:
    """Swaps ids by SSE before their rows are split, with this rank's position in the global batch.

    ``inputs`` are (feature, table) pairs in the order of the input's features. Swaps are computed on the CPU.
    """

    def __init__(self, settings: TableSettings, step_context: StepContext, inputs: Sequence[tuple[str, str]]) -> None:
        self._step_context, self._bounds = step_context, settings.bounds
        self._tables: list[TableConfig] = [settings.tables[table] for _, table in inputs]
        self._draws: list[SwapDraws | None] = [
            swap_draws([(settings.tables[table], feature, settings.sse[feature])], settings.seed)
            if settings.probability(feature) > 0.0
            else None
            for feature, table in inputs
        ]

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same bags with int64 ids, in training with some ids swapped."""
        values = features.values().long()
        if self._bounds == "ignore":
            bounded = zip(self._pieces(features, values), self._tables, strict=True)
            # TorchRec maps ids past the table's end to other ranks; -1 is outside of every shard.
            values = torch.cat([ids.where(ids < table.num_rows, -1) for (ids, _), table in bounded])
        if self._step_context.training and any(draws is not None for draws in self._draws):
            drawn = zip(self._pieces(features, values), self._draws, strict=True)
            values = torch.cat([ids if draws is None else self._swap(ids, bag, draws) for (ids, bag), draws in drawn])
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=values,
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
        )

    def _pieces(self, features: KeyedJaggedTensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each feature its ids and the offsets at which its bags start in these ids."""
        size, offsets = features.stride(), features.offsets().long()
        offsets = offsets - offsets[0]
        for number in range(len(self._tables)):
            bounds = offsets[number * size : (number + 1) * size + 1]
            yield values[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0]

    def _swap(self, ids: Tensor, offsets: Tensor, draws: SwapDraws) -> Tensor:
        step = self._step_context.step
        assert step is not None, "checked before input is distributed"
        swapped = swap_feature(ids.cpu(), offsets.cpu(), draws, step, self._step_context.sample_offset)
        return swapped.to(ids.device)


class SwapBefore(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Mixin that swaps ids while they are row numbers of the whole table, before the next base class sends them."""

    def __init__(
        self, settings: TableSettings, step_context: StepContext, inputs: Sequence[tuple[str, str]], **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        in_one_exchange(self)
        self._swapper = Swapper(settings, step_context, inputs)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
        return super().forward(self._swapper(sparse_features))


class SwappingDist(SwapBefore, RwSparseFeaturesDist):
    """Swaps ids, and sends each to the rank of its row."""


class SummingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Partial sums [samples of all ranks, D] on each rank -> sums [own samples, D]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> NoWait[Tensor]:
        assert sharding_ctx is not None
        return NoWait(sum_over_ranks(local_embs, list(sharding_ctx.batch_size_per_rank), self._group))


def sum_over_ranks(partial_sums: Tensor, batch_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sum partial sums [samples of all ranks of ``group``, D] over ranks, and return sums [own samples, D]."""
    if len(batch_sizes) == 1:
        return partial_sums
    return SumExchange.apply(partial_sums, batch_sizes, group)


class SumExchange(torch.autograd.Function):
    """Reduce-scatter of unequal parts as all-to-all and a sum in rank order; backward hands each gradient to all."""

    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, batch_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.batch_sizes, ctx.group = batch_sizes, group
        shape = batch_sizes[dist.get_rank(group)], partial_sums.shape[1]
        return sum_in_rank_order(
            all_to_all("partial sums", partial_sums.split(batch_sizes), [shape] * len(batch_sizes), group)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        shapes = [(size, grad.shape[1]) for size in ctx.batch_sizes]
        return torch.cat(all_gather("gradients of sums", grad, shapes, ctx.group)), None, None


class SequenceDist(BaseEmbeddingDist[SequenceShardingContext, Tensor, Tensor]):
    """Rows that this rank looked up for all ranks [n, D] -> rows of this rank's ids, feature by feature, in id order.

    TorchRec's exchange fails for float64 if batch sizes differ between ranks: its operator of FBGEMM does not support
    it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None) -> NoWait[Tensor]:
        assert sharding_ctx is not None
        assert sharding_ctx.lengths_after_input_dist is not None
        by_rank = local_embs.index_select(
            0, _order_by_rank(sharding_ctx.lengths_after_input_dist, list(sharding_ctx.batch_size_per_rank))
        )
        rows: Tensor = RowExchange.apply(by_rank, sharding_ctx.output_splits, sharding_ctx.input_splits, self._group)
        unbucketize = sharding_ctx.unbucketize_permute_tensor
        return NoWait(rows if unbucketize is None else rows.index_select(0, unbucketize))


def _order_by_rank(lengths: Tensor, batch_sizes: list[int]) -> Tensor:
    """Return the positions int64 [n] that order rows by rank: first all rows of rank 0, then those of rank 1.

    The rows belong to bags of ``lengths`` [F, samples of all ranks], feature by feature.
    """
    bags = lengths.long()
    counts = torch.stack([part.sum(1) for part in bags.split(batch_sizes, dim=1)])
    starts = (counts.T.reshape(-1).cumsum(0) - counts.T.reshape(-1)).view(counts.T.shape).T.reshape(-1)
    counts = counts.reshape(-1)
    shift = starts - (counts.cumsum(0) - counts)
    return shift.repeat_interleave(counts) + torch.arange(int(counts.sum()), device=lengths.device)


class RowExchange(torch.autograd.Function):
    """All-to-all of rows [n, D]; backward sends each gradient back to the rank that sent the row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        shapes = [(number, rows.shape[1]) for number in received]
        return torch.cat(all_to_all("rows", rows.split(sent), shapes, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        shapes = [(number, grad.shape[1]) for number in ctx.sent]
        return torch.cat(all_to_all("gradients of rows", grad.split(ctx.received), shapes, ctx.group)), None, None, None
