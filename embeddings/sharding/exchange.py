"""What travels between ranks where rows of a table are split: ids to their rows, partial sums back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import NoWait

from embeddings.config import TableConfig
from embeddings.sharding.settings import Place, TableSettings
from embeddings.sse import swap


class SwappingDist(RwSparseFeaturesDist):
    """Checks and swaps ids, which are still rows of the whole table here, and sends each to the rank of its row."""

    def __init__(
        self, settings: TableSettings, place: Place, inputs: Sequence[tuple[str, TableConfig]], **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        self._settings = settings
        self._place = place
        self._inputs = inputs

    def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
        return super().forward(self._swapped(sparse_features))

    def _swapped(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        batch_size = features.stride()
        values = features.values().long()
        offsets = features.offsets().long()
        offsets = offsets - offsets[0]
        pieces = []
        for number, (feature, table) in enumerate(self._inputs):
            bounds = offsets[number * batch_size : (number + 1) * batch_size + 1]
            ids = values[int(bounds[0]) : int(bounds[-1])]
            _check_ids(ids, feature, table)
            config = self._settings.sse.get(feature)
            if self._place.training and config is not None and config.probability > 0.0:
                ids = swap(
                    ids, bounds, table=table, feature=feature, config=config,
                    seed=self._settings.seed, step=self._place.step, sample_offset=self._place.sample_offset,
                )  # fmt: skip
            pieces.append(ids)
        return KeyedJaggedTensor(
            keys=features.keys(), values=torch.cat(pieces), lengths=features.lengths(), stride=batch_size
        )


class SummingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Partial sums [samples of all ranks, D] on each rank -> sums [own samples, D]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> NoWait[Tensor]:
        assert sharding_ctx is not None
        return NoWait(_SumExchange.apply(local_embs, list(sharding_ctx.batch_size_per_rank), self._group))


class _SumExchange(torch.autograd.Function):
    """Reduce-scatter of unequal parts as all-to-all and a sum in rank order; backward hands each gradient to all."""

    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, batch_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        ctx.batch_sizes, ctx.group = batch_sizes, group
        mine, dim = batch_sizes[rank], partial_sums.shape[1]
        received = partial_sums.new_empty(world_size * mine, dim)
        dist.all_to_all_single(received, partial_sums.contiguous(), [mine] * world_size, batch_sizes, group=group)
        return received.view(world_size, mine, dim).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        world_size = dist.get_world_size(ctx.group)
        gathered = grad.new_empty(sum(ctx.batch_sizes), grad.shape[1])
        copies = grad.repeat(world_size, 1)
        dist.all_to_all_single(gathered, copies, ctx.batch_sizes, [len(grad)] * world_size, group=ctx.group)
        return gathered, None, None


def _check_ids(ids: Tensor, feature: str, table: TableConfig) -> None:
    """Before bucketing, which would send an id outside the table to some rank without a word."""
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if low < 0 or high >= table.num_rows:
        bad = low if low < 0 else high
        raise ValueError(
            f"feature '{feature}': id {bad} is not a row of table '{table.name}', which has {table.num_rows} rows: "
            "ids must lie in [0, rows); map unknown ids to row 1"
        )
