"""Sharded bags: the sharder of an EmbeddingBagCollection, and what it puts in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv, ShardingType

from embeddings.sharding.means import divide, num_ids
from embeddings.sharding.settings import (
    SHARDING_TYPES,
    LocalPiece,
    LocalTable,
    Place,
    TableSettings,
    check_collection,
    pooling_of,
)
from embeddings.sharding.shardings import RowWise, TableWise
from embeddings.tables import EmbeddingTables


class TableSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection over EmbeddingTables, table-wise or row-wise, on every kind of device."""

    def __init__(self, settings: TableSettings) -> None:
        super().__init__()
        self._settings = settings

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTables:
        check_collection(module, self._settings.tables)
        return ShardedTables(self._settings, module, params, env, device, module_fqn)

    @property
    def sharded_module_type(self) -> type[ShardedTables]:
        return ShardedTables


class ShardedTables(ShardedEmbeddingBagCollection):
    """The sharded tables of a model: KeyedJaggedTensor -> KeyedTensor, and the steps of their optimizer.

    Blocks of the KeyedTensor come in the order of the plan: take them by name. A feature of two tables is named
    ``feature@table``. :meth:`step` and the rest act on this rank's rows; only ``forward`` and ``backward`` communicate.
    """

    def __init__(
        self,
        settings: TableSettings,
        module: EmbeddingBagCollection,
        params: Mapping[str, Any],
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> None:
        # TorchRec's constructor builds the shardings, so they must find these.
        self._settings = settings
        self._place = Place()
        super().__init__(module, params, env, device=device, module_fqn=module_fqn)
        # A model may have built its collection with another word for pooling: means are divided here alone.
        self._has_mean_pooling_callback = False
        self._split_means = self._find_split_means()

    def create_embedding_bag_sharding(  # type: ignore[override]  # an instance method here: it needs the settings
        self,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> TableWise | RowWise:
        kind = sharding_infos[0].param_sharding.sharding_type
        if kind == ShardingType.TABLE_WISE.value:
            return TableWise(self._settings, sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
        if kind == ShardingType.ROW_WISE.value:
            return RowWise(
                self._settings, self._place, sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
            )
        raise ValueError(f"sharding {kind} is not available yet: use one of {', '.join(SHARDING_TYPES)}")

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        if self._settings.dtype == torch.float32:
            super()._initialize_torch_state(skip_registering)
        else:
            # TorchRec has no data type for float64, so there state_dict() holds no tables.
            self.embedding_bags = nn.ModuleDict()

    def reset_parameters(self) -> None:
        """Nothing: EmbeddingTables has drawn its initial rows by row number or key, the same in every plan."""

    def train(self, mode: bool = True) -> ShardedTables:
        super().train(mode)
        self._place.training = mode
        return self

    # --- mean pooling of split rows ----------------------------------------------------------------------------------

    def _find_split_means(self) -> dict[str, tuple[str, int]]:
        """(feature, padding row or -1) by the name of its block, for mean features of row-wise tables."""
        found = {}
        for sharding in self._embedding_shardings:
            if isinstance(sharding, RowWise):
                for name, feature, table in sharding.blocks():
                    if pooling_of(self._settings.tables[table], feature) == "mean":
                        found[name] = (feature, self._settings.tables[table].padding_row)
        return found

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        if features.variable_stride_per_key():
            raise ValueError("a batch size that varies between features is not available yet: give every feature one")
        distributed = super().input_dist(ctx, features)
        if self._split_means:
            # Swaps keep the number of ids that are not padding, so ids may be counted before them.
            ctx.divisor = torch.stack([num_ids(features, *which) for which in self._split_means.values()], dim=1)
        return distributed

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        return self._with_means(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        return self._with_means(super().compute_and_output_dist(ctx, input), ctx)

    def _with_means(self, awaitable: Any, ctx: Any) -> Any:
        if self._split_means:
            awaitable.callbacks.append(partial(divide, names=list(self._split_means), divisor=ctx.divisor))
        return awaitable

    # --- steps -------------------------------------------------------------------------------------------------------

    def kernels(self) -> Iterator[EmbeddingTables]:
        """Every EmbeddingTables of this rank."""
        for lookup in self._lookups:
            for module in lookup.modules():
                if isinstance(module, EmbeddingTables):
                    yield module

    def set_context(self, step: int, sample_offset: int) -> None:
        """Before each training forward: the step it computes, and the global index of this rank's first sample."""
        self._place.step, self._place.sample_offset = step, sample_offset
        for kernel in self.kernels():
            # Lookups that swap see the whole batch; those of split rows swap nothing.
            kernel.set_context(step, 0)

    def step(self, k: int) -> None:
        """Applies what this rank's backward recorded, as step ``k``."""
        for kernel in self.kernels():
            kernel.step(k)

    def discard(self) -> None:
        """Drops what this rank's backward recorded."""
        for kernel in self.kernels():
            kernel.discard()

    def non_finite_tables(self) -> list[str]:
        """Tables with a gradient recorded on this rank that is not finite."""
        return sorted({name for kernel in self.kernels() for name in kernel.non_finite_tables()})

    def local_tables(self) -> dict[str, LocalTable]:
        """By name, the rows that this rank holds."""
        return {
            table.name: LocalTable(kernel, table.row_start, table.row_count)
            for kernel in self.kernels()
            for table in kernel.layout.tables
        }

    def local_pieces(self) -> list[LocalPiece]:
        """What this rank holds of every table, sorted by name, row_start and column_start."""
        pieces = [
            LocalPiece(table.name, kernel, table.row_start, table.row_count, 0, table.dim)
            for kernel in self.kernels()
            for table in kernel.layout.tables
        ]
        return sorted(pieces, key=lambda piece: (piece.name, piece.row_start, piece.column_start))
