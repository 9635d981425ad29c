"""Our tables under TorchRec's sharding: table-wise and row-wise, on any number of ranks, also one.

TorchRec plans, wraps and distributes inputs; :class:`TableSharder` makes its lookups run
:class:`embeddings.tables.EmbeddingTables`. What differs from the stock sharder, and why:

* SSE. Table-wise, ids are whole and ordered by rank after the all-to-all, so the lookup swaps, the index in the
  concatenation being the index in the global batch. Row-wise, the new row may live elsewhere: ids are swapped before
  they are distributed, with the rank's own offset. The bits are the same (:mod:`embeddings.sse`).
* Row-wise runs on CPU, and with batches that differ between ranks, also empty ones: gloo refuses the reduce-scatter of
  unequal parts that TorchRec uses, so :class:`_SumExchange` sums after an all-to-all, in rank order.
* Mean pooling of split rows divides by the exact number of ids. TorchRec divides by that number + 1e-6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding, RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import NoWait, ShardingEnv, ShardingType
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule

from embeddings.config import Pooling, SSEConfig, TableConfig
from embeddings.optim import RowOptimizer
from embeddings.sse import swap
from embeddings.tables import EmbeddingTables

SHARDING_TYPES = (ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value)


@dataclass(frozen=True)
class TableSettings:
    """What every shard of the tables is built from; ``sse`` is by feature."""

    tables: Mapping[str, TableConfig]
    optimizer: RowOptimizer
    sse: Mapping[str, SSEConfig]
    seed: int = 0
    backend: str = "numba"
    dtype: torch.dtype = torch.float32

    def probability(self, feature: str) -> float:
        return self.sse[feature].probability if feature in self.sse else 0.0


class LocalTable(NamedTuple):
    """The rows [row_start, row_start + row_count) of a table, as this rank holds them in ``tables``."""

    tables: EmbeddingTables
    row_start: int
    row_count: int


@dataclass
class _Place:
    """Where in training the next forward is; shared by the input distributions of a module."""

    step: int = 1
    sample_offset: int = 0
    training: bool = True


def embedding_bag_collection(tables: Sequence[TableConfig]) -> EmbeddingBagCollection:
    """The unsharded module of these tables, on the meta device: a model holds it until it is sharded.

    Pooling is each feature's own (:class:`TableConfig`), so the word in TorchRec's config says nothing.
    """
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_rows,
                embedding_dim=table.dim,
                feature_names=list(table.features),
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )


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
        _check_collection(module, self._settings.tables)
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
        self._place = _Place()
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
    ) -> TwPooledEmbeddingSharding | RwPooledEmbeddingSharding:
        kind = sharding_infos[0].param_sharding.sharding_type
        if kind == ShardingType.TABLE_WISE.value:
            return _TableWise(self._settings, sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
        if kind == ShardingType.ROW_WISE.value:
            return _RowWise(
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
            if isinstance(sharding, _RowWise):
                for name, feature, table in sharding.blocks():
                    if _pooling(self._settings.tables[table], feature) == "mean":
                        found[name] = (feature, self._settings.tables[table].padding_row)
        return found

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        if features.variable_stride_per_key():
            raise ValueError("a batch size that varies between features is not available yet: give every feature one")
        distributed = super().input_dist(ctx, features)
        if self._split_means:
            # Swaps keep the number of ids that are not padding, so ids may be counted before them.
            ctx.divisor = torch.stack([_num_ids(features, *which) for which in self._split_means.values()], dim=1)
        return distributed

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        return self._with_means(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        return self._with_means(super().compute_and_output_dist(ctx, input), ctx)

    def _with_means(self, awaitable: Any, ctx: Any) -> Any:
        if self._split_means:
            awaitable.callbacks.append(partial(_divide, names=list(self._split_means), divisor=ctx.divisor))
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


class _TableWise(TwPooledEmbeddingSharding):
    def __init__(self, settings: TableSettings, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._settings = settings

    def create_lookup(self, device: Any = None, fused_params: Any = None, feature_processor: Any = None) -> _Lookup:
        return _Lookup(
            self._settings,
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )


class _RowWise(RwPooledEmbeddingSharding):
    def __init__(self, settings: TableSettings, place: _Place, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._settings = settings
        self._place = place

    def blocks(self) -> Iterator[tuple[str, str, str]]:
        """(block name, feature, table) in the order of the features that this sharding takes."""
        for table in self.embedding_tables():
            for name, feature in zip(table.embedding_names, table.feature_names, strict=True):
                yield name, feature, table.name

    def create_input_dist(self, device: torch.device | None = None) -> _SwappingDist:
        return _SwappingDist(
            self._settings,
            self._place,
            [(feature, self._settings.tables[table]) for _, feature, table in self.blocks()],
            pg=self._pg,
            num_features=self._get_num_features(),
            feature_hash_sizes=self._get_feature_hash_sizes(),
            device=device if device is not None else self._device,
        )

    def create_lookup(self, device: Any = None, fused_params: Any = None, feature_processor: Any = None) -> _Lookup:
        return _Lookup(
            self._settings,
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            sharding_type=ShardingType.ROW_WISE,
            env=self._env,
        )

    def create_output_dist(self, device: torch.device | None = None) -> _SummingDist:
        return _SummingDist(self._pg)


class _SwappingDist(RwSparseFeaturesDist):
    """Checks and swaps ids, which are still rows of the whole table here, and sends each to the rank of its row."""

    def __init__(
        self, settings: TableSettings, place: _Place, inputs: Sequence[tuple[str, TableConfig]], **keywords: Any
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
            probability = self._settings.probability(feature)
            if self._place.training and probability > 0.0:
                ids = swap(
                    ids, bounds, table=table, feature=feature, probability=probability,
                    seed=self._settings.seed, step=self._place.step, sample_offset=self._place.sample_offset,
                )  # fmt: skip
            pieces.append(ids)
        return KeyedJaggedTensor(
            keys=features.keys(), values=torch.cat(pieces), lengths=features.lengths(), stride=batch_size
        )


class _SummingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
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


class _Lookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's grouped lookup with our kernel in it."""

    def __init__(self, settings: TableSettings, **keywords: Any) -> None:
        self._settings = settings
        super().__init__(**keywords)
        # What a rank without tables sends must have the type of what the others send.
        self._dummy_embs_tensor = torch.empty(0, dtype=settings.dtype, device=keywords["device"], requires_grad=True)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: Any, pg: Any, sharding_type: Any, env: Any
    ) -> TableKernel:
        if config.is_weighted:
            raise ValueError("weighted bags are not available yet: build the collection with is_weighted=False")
        return TableKernel(self._settings, config, pg, device, sharding_type)


class TableKernel(BaseBatchedEmbeddingBag[Tensor], FusedOptimizerModule):
    """The shards of a group of tables on one rank, looked up by EmbeddingTables.

    Row state is no state of a torch optimizer: it is saved by row (trainer/checkpoint.py), so TorchRec's is empty.
    A feature may read two tables, but EmbeddingTables takes it once: then the group is looked up in two parts.
    """

    def __init__(
        self,
        settings: TableSettings,
        config: GroupedEmbeddingConfig,
        group: dist.ProcessGroup,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> None:
        super().__init__(config, group, device, sharding_type)
        split = sharding_type == ShardingType.ROW_WISE
        self._parts = nn.ModuleList()
        self._num_features: list[int] = []
        for tables in _without_repeated_features(config.embedding_tables):
            shards = [_shard_config(settings.tables[table.name], table, split) for table in tables]
            features = [feature for shard in shards for feature in shard.features]
            self._parts.append(
                EmbeddingTables(
                    shards,
                    settings.optimizer,
                    sse={feature: settings.sse[feature] for feature in features if feature in settings.sse},
                    seed=settings.seed,
                    backend=settings.backend,  # type: ignore[arg-type]
                    dtype=settings.dtype,
                    sse_outside=split,
                )
            )
            self._num_features.append(len(features))

    def forward(self, features: KeyedJaggedTensor, vbe_output: Any = None, vbe_output_offsets: Any = None) -> Tensor:
        parts = features.split(self._num_features) if len(self._parts) > 1 else [features]
        pooled = [
            tables(part.values().long(), part.offsets().long()) for tables, part in zip(self._parts, parts, strict=True)
        ]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    @property
    def emb_module(self) -> nn.ModuleList:  # type: ignore[override]
        return self._parts

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return EmptyFusedOptimizer()

    def split_embedding_weights(self) -> list[Tensor]:
        return [part.weight(table.name) for part in self._parts for table in part.layout.tables]  # type: ignore[union-attr, operator]

    def named_split_embedding_weights(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        dot = f"{prefix}." if prefix else ""
        for table, weight in zip(self._config.embedding_tables, self.split_embedding_weights(), strict=True):
            yield f"{dot}{table.name}.weight", weight

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self.named_split_embedding_weights(prefix):
            yield name, _fused_parameter(weight)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        for table, weight in zip(self._config.embedding_tables, self.split_embedding_weights(), strict=True):
            yield table.name, _fused_parameter(weight)


def _fused_parameter(weight: Tensor) -> nn.Parameter:
    """The rows as TorchRec wants to see them: a parameter that no dense optimizer steps."""
    parameter = nn.Parameter(weight, requires_grad=False)
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
    return parameter


def _pooling(table: TableConfig, feature: str) -> Pooling:
    return tuple(table.pooling)[table.features.index(feature)]  # type: ignore[return-value]  # a tuple once built


def _shard_config(table: TableConfig, shard: ShardedEmbeddingTable, split: bool) -> TableConfig:
    return dataclasses.replace(
        table,
        features=tuple(shard.feature_names),
        # A mean over several ranks is divided where the sum is complete.
        pooling="sum" if split else {feature: _pooling(table, feature) for feature in shard.feature_names},
        row_start=shard.local_metadata.shard_offsets[0],
        row_count=shard.local_rows,
    )


def _without_repeated_features(tables: Sequence[ShardedEmbeddingTable]) -> list[list[ShardedEmbeddingTable]]:
    """The tables in order, cut wherever a feature would come a second time."""
    parts: list[list[ShardedEmbeddingTable]] = []
    seen: set[str] = set()
    for table in tables:
        if not parts or seen & set(table.feature_names):
            parts.append([])
            seen = set()
        parts[-1].append(table)
        seen |= set(table.feature_names)
    return parts


def _check_collection(module: EmbeddingBagCollection, tables: Mapping[str, TableConfig]) -> None:
    """That the model's collection and the table configs speak of the same tables."""
    found = {
        config.name: (config.num_embeddings, config.embedding_dim, set(config.feature_names))
        for config in module.embedding_bag_configs()
    }
    wanted = {table.name: (table.num_rows, table.dim, set(table.features)) for table in tables.values()}
    if found != wanted:
        differ = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise ValueError(
            f"the model's embeddings and the table configs differ in tables {differ}: "
            "build the model's with embeddings.sharding.embedding_bag_collection"
        )


def _check_ids(ids: Tensor, feature: str, table: TableConfig) -> None:
    """Before bucketing, which would send an id outside the table to some rank without a word."""
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if low < 0 or high >= table.num_rows:
        bad = low if low < 0 else high
        raise ValueError(
            f"feature '{feature}': id {bad} is not a row of table '{table.name}', which has {table.num_rows} rows: "
            "ids must lie in [0, rows); map unknown ids to row 1"
        )


def _num_ids(features: KeyedJaggedTensor, feature: str, padding_row: int) -> Tensor:
    """How many ids of ``feature`` are not padding, at least 1: [B] int64."""
    bag = features[feature]
    real = torch.cat([torch.zeros(1, dtype=torch.int64), (bag.values() != padding_row).cumsum(0)])
    offsets = bag.offsets().long()
    return (real[offsets[1:]] - real[offsets[:-1]]).clamp(min=1)


def _divide(pooled: KeyedTensor, names: list[str], divisor: Tensor) -> KeyedTensor:
    """Sums to means: block ``names[i]`` divided by divisor[:, i]."""
    blocks = list(pooled.values().split(pooled.length_per_key(), dim=1))
    for column, name in enumerate(names):
        number = pooled.keys().index(name)
        blocks[number] = blocks[number] / divisor[:, column : column + 1].to(blocks[number].dtype)
    return KeyedTensor(pooled.keys(), pooled.length_per_key(), torch.cat(blocks, dim=1), key_dim=1)
