"""What shards of tables are built from, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.types import ShardingType

from embeddings.config import Pooling, SSEConfig, TableConfig
from embeddings.optim import RowOptimizer
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


class LocalPiece(NamedTuple):
    """A rectangle of table ``name`` that this rank holds, under that name in ``tables``.

    A rank may hold several of one table, side by side or apart. Every rank holds the whole of a data-parallel table:
    ``replica`` counts the ranks that do, and 0 is the one that speaks for all (it alone need be saved). Row state that
    is one number for each row, as last_update_step, is the same in all column pieces of a row.
    """

    name: str
    tables: EmbeddingTables
    row_start: int
    row_count: int
    column_start: int
    column_count: int
    replica: int = 0


@dataclass
class Place:
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


def check_collection(module: EmbeddingBagCollection, tables: Mapping[str, TableConfig]) -> None:
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


def pooling_of(table: TableConfig, feature: str) -> Pooling:
    return tuple(table.pooling)[table.features.index(feature)]  # type: ignore[return-value]  # a tuple once built
