"""Settings of sharded tables, a rank's pieces of the tables, and the TorchRec collections that describe the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.backends import Backend
from embeddings.kernels.layout import COMPUTE_DTYPES, Bounds
from embeddings.optim import RowOptimizer
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import Pooling, TableConfig

# TorchRec's data type of stored rows. It has none for float64.
DATA_TYPES = {torch.float32: DataType.FP32, torch.float16: DataType.FP16, torch.bfloat16: DataType.BF16}


@dataclass(frozen=True)
class TableSettings:
    """The arguments of :class:`embeddings.embedding_tables.EmbeddingTables` from which every shard is built.

    ``tables`` are keyed by name; see :meth:`of`. ``dtypes`` and ``state_dtypes`` are those of single tables, keyed by
    table name. With ``bounds`` ``fatal``, an id outside its table is an error on every rank.

    Raises:
        ValueError: tables with different compute types.
    """

    tables: Mapping[str, TableConfig]
    optimizer: RowOptimizer
    sse: Mapping[str, SSEConfig] = field(default_factory=dict)
    seed: int = 0
    backend: Backend | None = None
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype | None = None
    bounds: Bounds = "fatal"
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    state_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in self.dtypes.items():
            if COMPUTE_DTYPES[dtype] != self.compute_dtype:
                raise ValueError(
                    f"table '{name}': rows of {dtype} are computed in {COMPUTE_DTYPES[dtype]}, those of other tables "
                    f"in {self.compute_dtype}: give all tables rows of one compute type"
                )

    @classmethod
    def of(cls, tables: Iterable[TableConfig], *arguments: Any, **keywords: Any) -> TableSettings:
        """Return settings with the given tables; the other arguments are those of the class after ``tables``."""
        return cls({table.name: table for table in tables}, *arguments, **keywords)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of lookups' results and of gradients: the same for all tables."""
        return COMPUTE_DTYPES[self.dtype]

    def dtype_of(self, table: str) -> torch.dtype:
        """Return the dtype of the stored rows of a table."""
        return self.dtypes.get(table, self.dtype)

    def state_dtype_of(self, table: str) -> torch.dtype:
        """Return the dtype of the optimizer state of a table."""
        return self.state_dtypes.get(table, self.state_dtype or self.compute_dtype)

    def probability(self, feature: str) -> float:
        return self.sse[feature].probability if feature in self.sse else 0.0


class LocalPiece(NamedTuple):
    """A rectangle of table ``name`` that this rank holds, as the table of that name in ``tables``.

    A rank may hold several pieces of one table, adjacent or not. A data-parallel table is whole on every rank;
    ``replica`` then numbers the copies, and a checkpoint needs only replica 0. State with one number per row, such as
    last_update_step, is the same in all pieces that hold columns of the row.
    """

    name: str
    tables: EmbeddingTables
    row_start: int
    row_count: int
    column_start: int
    column_count: int
    replica: int = 0


@dataclass
class StepContext:
    """The step and sample offset of the next batch to be distributed; a module's input distributions share it.

    ``step`` is None until it is set for the first time.
    """

    step: int | None = None
    sample_offset: int = 0
    part_offset: int = 0
    training: bool = True


def embedding_bag_collection(tables: Sequence[TableConfig], is_weighted: bool = False) -> EmbeddingBagCollection:
    """Return an unsharded EmbeddingBagCollection of these tables, on the meta device, for use in a model to be sharded.

    Pooling is set for each feature (:class:`TableConfig`); TorchRec's own setting is ignored. With ``is_weighted``
    each id comes with a weight.
    """
    configs = [EmbeddingBagConfig(**_described(table)) for table in tables]
    with _NothingDrawn():
        return EmbeddingBagCollection(tables=configs, is_weighted=is_weighted, device=torch.device("meta"))


def embedding_collection(tables: Sequence[TableConfig]) -> EmbeddingCollection:
    """Return an unsharded EmbeddingCollection of these tables, on the meta device.

    The tables must have ``pooling="none"`` and equal dims.
    """
    configs = [EmbeddingConfig(**_described(table)) for table in tables]
    with _NothingDrawn():
        return EmbeddingCollection(tables=configs, device=torch.device("meta"))


def _described(table: TableConfig) -> dict[str, Any]:
    return {
        "name": table.name, "num_embeddings": table.num_rows, "embedding_dim": table.dim,
        "feature_names": list(table.features),
    }  # fmt: skip


class _NothingDrawn(TorchFunctionMode):
    """Skips the drawing of initial values, which imports torch's compiler (half a second) even on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function in (torch.nn.init.normal_, torch.nn.init.uniform_):
            return given["tensor"]
        return function(*args, **given)


def check_collection(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig], tables: Mapping[str, TableConfig]
) -> None:
    """Check that each table of a model's collection agrees with the table config of the same name.

    Tables of a collection of bags must be pooled; tables of a collection of sequences must not be.

    Raises:
        ValueError: the tables differ.
    """
    collected = {
        config.name: (
            config.num_embeddings,
            config.embedding_dim,
            set(config.feature_names),
            isinstance(config, EmbeddingBagConfig),
        )
        for config in configs
    }
    configured = {
        name: (tables[name].num_rows, tables[name].dim, set(tables[name].features), "none" not in tables[name].pooling)
        for name in collected
        if name in tables
    }
    if collected != configured:
        differ = sorted(name for name in collected if collected[name] != configured.get(name))
        raise ValueError(
            f"the model's embeddings and the table configs differ in tables {differ}: build the model's with "
            "embedding_bag_collection (pooled) or embedding_collection (pooling none) of embeddings.sharding"
        )


def pooling_of(table: TableConfig, feature: str) -> Pooling:
    """Return the pooling of ``feature`` in ``table``."""
    return tuple(table.pooling)[table.features.index(feature)]  # type: ignore[return-value]  # a tuple once built
