"""TorchRec's shardings of tables with the lookups of this package.

Row-wise shardings also use the exchanges of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingEnv

from embeddings.sharding.exchange.ids import in_one_exchange
from embeddings.sharding.exchange.pooled import PooledDist
from embeddings.sharding.exchange.split_rows import SequenceDist, SummingDist, SwappingDist
from embeddings.sharding.lookup import SequenceLookup, TableLookup
from embeddings.sharding.settings import StepContext, TableSettings
from embeddings.tables.shardings import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, TABLE_WISE, Sharding


class OurSharding:
    """Mixin of all shardings; each inherits from it before a class of TorchRec.

    ``kind`` is the entry of :mod:`embeddings.tables.shardings` that it implements.

    Raises:
        ValueError: columns are split, but the optimizer needs whole rows.
    """

    kind: ClassVar[Sharding]
    _lookup: type[TableLookup] | type[SequenceLookup] = TableLookup
    _env: ShardingEnv
    _device: torch.device | None

    def __init__(
        self,
        settings: TableSettings,
        step_context: StepContext,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None,
        **keywords: Any,
    ) -> None:
        self._settings, self._step_context = settings, step_context
        if self.kind.columns_over:
            _check_columns(settings, [info.embedding_config.name for info in sharding_infos])
        super().__init__(sharding_infos, env, device, **keywords)  # type: ignore[call-arg]

    def create_input_dist(self, device: torch.device | None = None) -> Any:
        return in_one_exchange(super().create_input_dist(device))  # type: ignore[misc]

    def create_lookup(
        self, device: Any = None, fused_params: Any = None, feature_processor: Any = None
    ) -> TableLookup | SequenceLookup:
        return self._lookup(
            self._settings,
            rows_are_split=bool(self.kind.rows_over),
            replicated=self.kind.replicated,
            grouped_configs=self._local_groups(),
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            env=self._env,
        )

    def _local_groups(self) -> list[GroupedEmbeddingConfig]:
        return self._grouped_embedding_configs  # type: ignore[attr-defined, no-any-return]

    def _groups(self) -> list[GroupedEmbeddingConfig]:
        """Return the groups of tables, in the order in which this sharding takes their features."""
        return self._grouped_embedding_configs  # type: ignore[attr-defined, no-any-return]

    def blocks(self) -> Iterator[tuple[str, str, str]]:
        """Yield (output block name, feature, table) in the order in which this sharding takes features."""
        for group in self._groups():
            for table in group.embedding_tables:
                for name, feature in zip(table.embedding_names, table.feature_names, strict=True):
                    yield name, feature, table.name


def _check_columns(settings: TableSettings, names: list[str]) -> None:
    optimizer = settings.optimizer
    if optimizer.clip_row_norm is not None:
        raise ValueError(
            f"tables {', '.join(names)}: clip_row_norm needs the gradient of a whole row, and their columns are split: "
            "use table_wise, row_wise or data_parallel sharding, or clip the global norm"
        )
    if optimizer.row_state_names:
        raise ValueError(
            f"tables {', '.join(names)}: {type(optimizer).__name__} keeps one number for a whole row, and their "
            "columns are split: use table_wise, row_wise or data_parallel sharding, or state for each element"
        )


class TableWise(OurSharding, TwPooledEmbeddingSharding):
    """Each table is on one rank."""

    kind = TABLE_WISE

    def create_output_dist(self, device: torch.device | None = None) -> PooledDist:
        dims = self.embedding_dims()
        return PooledDist(self._env.process_group, self._dim_sum_per_rank(), dims, range(len(dims)))


class PooledColumns(OurSharding):
    """The common part of shardings of bags that split tables only by columns."""

    # Dims of the column shards, rank by rank, and the order that joins those of a feature.
    _embedding_dims: list[int]
    _embedding_order: list[int]
    _dim_sum_per_rank: Callable[[], list[int]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, permute_embeddings=True)

    def create_output_dist(self, device: torch.device | None = None) -> PooledDist:
        return PooledDist(
            self._env.process_group, self._dim_sum_per_rank(), self._embedding_dims, self._embedding_order
        )


class ColumnWise(PooledColumns, CwPooledEmbeddingSharding):
    """Columns of a table on several ranks.

    Every shard looks up the same ids, with the same swaps by SSE.
    """

    kind = COLUMN_WISE


class Replicated(OurSharding, DpPooledEmbeddingSharding):
    """Each table is on every rank (:mod:`embeddings.sharding.replicas`)."""

    kind = DATA_PARALLEL


class RowWise(OurSharding, RwPooledEmbeddingSharding):
    """Rows of a table on all ranks, in equal blocks."""

    kind = ROW_WISE

    def create_input_dist(self, device: torch.device | None = None) -> SwappingDist:
        return _row_wise_input(self, device)

    def create_output_dist(self, device: torch.device | None = None) -> SummingDist:
        return SummingDist(self._env.process_group)


class SequenceSharding(OurSharding):
    """The common part of shardings of sequences that send rows between ranks."""

    _lookup = SequenceLookup

    def create_output_dist(self, device: torch.device | None = None) -> SequenceDist:
        return SequenceDist(self._env.process_group)


class SequenceTableWise(SequenceSharding, TwSequenceEmbeddingSharding):
    """:class:`TableWise` for sequences."""

    kind = TABLE_WISE


class SequenceColumnWise(SequenceSharding, CwSequenceEmbeddingSharding):
    """:class:`ColumnWise` for sequences; all shards have one width (TorchRec's rule)."""

    kind = COLUMN_WISE


class SequenceReplicated(OurSharding, DpSequenceEmbeddingSharding):
    """:class:`Replicated` for sequences."""

    kind = DATA_PARALLEL
    _lookup = SequenceLookup


class SequenceRowWise(SequenceSharding, RwSequenceEmbeddingSharding):
    """:class:`RowWise` for sequences: rows travel back, nothing is summed."""

    kind = ROW_WISE

    def create_input_dist(self, device: torch.device | None = None) -> SwappingDist:
        return _row_wise_input(self, device, is_sequence=True)


def _row_wise_input(
    sharding: RowWise | SequenceRowWise, device: torch.device | None, is_sequence: bool = False
) -> SwappingDist:
    return SwappingDist(
        sharding._settings,
        sharding._step_context,
        [(feature, table) for _, feature, table in sharding.blocks()],
        pg=sharding._env.process_group,
        num_features=sharding._get_num_features(),
        feature_hash_sizes=sharding._get_feature_hash_sizes(),
        device=device if device is not None else sharding._device,
        is_sequence=is_sequence,
    )
