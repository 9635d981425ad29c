"""Sharded bags: the sharder of an EmbeddingBagCollection, and the module that replaces the collection."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from embeddings.sharding.exchange.pooled import PooledDist
from embeddings.sharding.host_shardings import Grid, TableColumnWise, TableRowWise
from embeddings.sharding.settings import TableSettings, pooling_of
from embeddings.sharding.sharded import ShardedTables, SharderOfTables
from embeddings.sharding.shardings import ColumnWise, OurSharding, Replicated, RowWise, TableWise
from embeddings.tables.config import TableConfig

BAG_SHARDINGS: dict[str, type[Any]] = {
    sharding.kind.torchrec_type: sharding
    for sharding in (TableWise, RowWise, ColumnWise, Replicated, TableRowWise, TableColumnWise, Grid)
}


class ShardedBags(ShardedTables, ShardedEmbeddingBagCollection):
    """The sharded bags of a model: KeyedJaggedTensor -> KeyedTensor.

    The order of the KeyedTensor's blocks depends on the plan: look a block up by its feature's name. A feature that two
    tables have is named ``feature@table``.
    """

    _held_as = "embedding_bags"
    _embedding_shardings: list[Any]
    _output_dists: list[nn.Module]
    _embedding_names: list[str]
    _embedding_dims: list[int]
    _uncombined_embedding_names: list[str]

    def __init__(
        self, settings: TableSettings, module: EmbeddingBagCollection, *arguments: Any, **keywords: Any
    ) -> None:
        self._prepare(settings, module.embedding_bag_configs())
        self._block_names = list(chain.from_iterable(get_embedding_names_by_table(module.embedding_bag_configs())))
        ShardedEmbeddingBagCollection.__init__(self, module, *arguments, **keywords)
        # This class alone divides means, whatever pooling the model's collection was built with.
        self._has_mean_pooling_callback = False
        self._split_means = self._find_split_means()

    def create_embedding_bag_sharding(  # type: ignore[override]  # an instance method here: it needs the settings
        self,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> Any:
        kind = sharding_infos[0].param_sharding.sharding_type
        return BAG_SHARDINGS[kind](self.settings, self._step_context, sharding_infos, env, device)

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        if len(self._output_dists) == 1 and isinstance(way := self._output_dists[0], PooledDist):
            # The exchange joins blocks anyway; here in the model's order, which saves reordering them later.
            way.sort(self._uncombined_embedding_names, self._block_names)
            dims = dict(zip(self._embedding_names, self._embedding_dims, strict=True))
            self._embedding_names = [name for name in self._block_names if name in dims]
            self._embedding_dims = [dims[name] for name in self._embedding_names]

    def _find_split_means(self) -> dict[str, tuple[str, TableConfig]]:
        """Return (feature, table) by block name, for features with mean pooling in tables whose rows are split."""
        means = {}
        for sharding in self._embedding_shardings:
            if isinstance(sharding, OurSharding) and sharding.kind.rows_over:
                for name, feature, table in sharding.blocks():
                    if pooling_of(self.settings.tables[table], feature) == "mean":
                        means[name] = (feature, self.settings.tables[table])
        return means

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        features = self._checked(ctx, features)
        distributed = super().input_dist(ctx, features)
        if self._split_means:
            # Swaps keep the number of ids that are not padding, so ids may be counted before them.
            ctx.divisor = torch.stack([_num_ids(features, *which) for which in self._split_means.values()], dim=1)
        return distributed

    def compute(self, ctx: Any, dist_input: Any) -> list[Tensor]:
        self._begin_lookup(ctx)
        return super().compute(ctx, dist_input)

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        return self._with_means(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        self._begin_lookup(ctx)
        return self._with_means(super().compute_and_output_dist(ctx, input), ctx)

    def _with_means(self, awaitable: Any, ctx: Any) -> Any:
        if self._split_means:
            awaitable.callbacks.append(partial(_divide, names=list(self._split_means), divisor=ctx.divisor))
        return awaitable


def _num_ids(features: KeyedJaggedTensor, feature: str, table: TableConfig) -> Tensor:
    """Return the number of ids of ``feature`` in each bag, without padding and ids outside ``table``, at least 1."""
    bag = features[feature]
    ids, offsets = bag.values(), bag.offsets().long()
    counted = (ids >= 0) & (ids < table.num_rows) & (ids != table.padding_row)
    before = torch.cat([offsets.new_zeros(1), counted.cumsum(0)])
    return (before[offsets[1:]] - before[offsets[:-1]]).clamp(min=1)


def _divide(pooled: KeyedTensor, names: list[str], divisor: Tensor) -> KeyedTensor:
    """Return ``pooled`` with each block ``names[i]`` divided by ``divisor[:, i]``, which turns sums into means."""
    blocks = list(pooled.values().split(pooled.length_per_key(), dim=1))
    for column, name in enumerate(names):
        number = pooled.keys().index(name)
        blocks[number] = blocks[number] / divisor[:, column : column + 1].to(blocks[number].dtype)
    return KeyedTensor(pooled.keys(), pooled.length_per_key(), torch.cat(blocks, dim=1), key_dim=1)


class TableSharder(SharderOfTables, EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection over EmbeddingTables, on every kind of device."""

    _shardings = BAG_SHARDINGS
    _sharded = ShardedBags
