"""Shardings that keep the rows or columns of a table on the ranks of one host, where exchanges are fast.

A host is a block of LOCAL_WORLD_SIZE consecutive ranks. Rows are split over the ranks of a host, which first add up
their partial sums. Then ranks with the same local rank on all hosts exchange the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding, TwRwSparseFeaturesDist
from torchrec.distributed.types import NoWait

from embeddings.sharding.exchange.pooled import PooledDist
from embeddings.sharding.exchange.split_rows import SwapBefore, sum_over_ranks
from embeddings.sharding.shardings import OurSharding, PooledColumns
from embeddings.tables.shardings import GRID, TABLE_COLUMN_WISE, TABLE_ROW_WISE


class TableColumnWise(PooledColumns, TwCwPooledEmbeddingSharding):
    """Columns of a table on the ranks of one host."""

    kind = TABLE_COLUMN_WISE


class HostRows(OurSharding):
    """The common part of the shardings that split rows over the ranks of a host."""

    _grouped_embedding_configs_per_rank: list[list[GroupedEmbeddingConfig]]
    _grouped_embedding_configs_per_node: list[list[GroupedEmbeddingConfig]]
    _rank: int
    _intra_pg: dist.ProcessGroup
    _cross_pg: dist.ProcessGroup
    _features_per_rank: Callable[[list[list[GroupedEmbeddingConfig]]], list[int]]
    _get_feature_hash_sizes: Callable[[], list[int]]
    _dim_sum_per_node: Callable[[], list[int]]

    def _local_groups(self) -> list[GroupedEmbeddingConfig]:
        return self._grouped_embedding_configs_per_rank[self._rank]

    def _groups(self) -> list[GroupedEmbeddingConfig]:
        return list(chain.from_iterable(self._grouped_embedding_configs_per_node))

    def create_input_dist(self, device: torch.device | None = None) -> HostSwappingDist:
        return HostSwappingDist(
            self._settings,
            self._step_context,
            [(feature, table) for _, feature, table in self.blocks()],
            pg=self._env.process_group,
            local_size=self._intra_pg.size(),
            features_per_rank=self._features_per_rank(self._grouped_embedding_configs_per_rank),
            feature_hash_sizes=self._get_feature_hash_sizes(),
            device=device if device is not None else self._device,
        )

    def create_output_dist(self, device: torch.device | None = None) -> HostSummingDist:
        return HostSummingDist(self._intra_pg, self._over_hosts())

    def _over_hosts(self) -> PooledDist:
        dims = self._dim_sum_per_node()
        return PooledDist(self._cross_pg, dims, dims, range(len(dims)))


class TableRowWise(HostRows, TwRwPooledEmbeddingSharding):
    """Rows of a table on the ranks of one host."""

    kind = TABLE_ROW_WISE


class Grid(HostRows, GridPooledEmbeddingSharding):
    """Columns of a table on several hosts, and the rows of each column shard on the ranks of its host."""

    kind = GRID

    def _over_hosts(self) -> PooledDist:
        return PooledDist(self._cross_pg, self._dim_sum_per_node(), self._embedding_dims, self._embedding_order)


class HostSwappingDist(SwapBefore, TwRwSparseFeaturesDist):
    """Swaps ids, and sends each to the rank of its row on its host."""


class HostSummingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Partial sums of a host's tables [samples of all ranks, D of the host] -> sums [own samples, D of all hosts]."""

    def __init__(self, on_host: dist.ProcessGroup, over_hosts: PooledDist) -> None:
        super().__init__()
        self._on_host, self._over_hosts = on_host, over_hosts

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> NoWait[Tensor]:
        assert sharding_ctx is not None
        sizes, local_size = sharding_ctx.batch_size_per_rank, dist.get_world_size(self._on_host)
        # The exchange of ids has joined the samples of all ranks with the same local rank.
        by_local_rank = [sizes[local_rank::local_size] for local_rank in range(local_size)]
        summed = sum_over_ranks(local_embs, [sum(part) for part in by_local_rank], self._on_host)
        return NoWait(self._over_hosts.exchange(summed, by_local_rank[dist.get_rank(self._on_host)]))
