"""Configuration of an embedding table: its rows, its dimension, the features that read it, its initial values.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Pooling = Literal["sum", "mean", "none"]
POOLINGS = ("sum", "mean", "none")
INITS = ("zero", "normal", "hash")


@dataclass(frozen=True)
class InitConfig:
    """Distribution of initial rows.

    ``zero``: all zeros. ``normal``: normal values with ``std``, drawn by row number. ``hash``: the same, drawn by the
    row's key.

    Raises:
        ValueError: an unknown kind of init, or a ``std`` that is negative or not finite.

    Example:
        >>> from embeddings import InitConfig
        >>> InitConfig("hash", std=0.1)  # an id begins at the same values in every run
        InitConfig(kind='hash', std=0.1)
    """

    kind: Literal["zero", "normal", "hash"] = "zero"
    std: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in INITS:
            raise ValueError(f"init kind '{self.kind}' is unknown: use one of {', '.join(INITS)}")
        if not 0.0 <= self.std < float("inf"):
            raise ValueError(f"init std must be a finite number of at least 0, not {self.std}")


@dataclass(frozen=True)
class TableConfig:
    """One embedding table, or a shard of its rows or columns that this rank holds.

    Rows below ``first_live_row`` are reserved: row 0 is padding (adds nothing, never learns), row 1 is for unknown ids.
    SSE draws among ``[first_live_row, num_rows)``. With ``first_live_row=0`` there is no padding row.

    ``pooling`` is one word for all features, or one word per feature (a mapping, or a sequence in the order of
    ``features``). ``none`` gives one output row for each id; in one lookup all features must have ``none``, or no
    feature. A shard holds rows ``[row_start, row_start + row_count)`` of the table; ids given to the lookup are then
    local. A column shard holds columns ``[column_start, column_start + dim)`` of ``total_dim`` (0: ``dim``).
    ``row_keys`` (uint64, one for each row of the table or of the shard) are hashes of the raw ids, for init ``hash``.
    With ``grows`` a live row is zero until :meth:`embeddings.embedding_tables.EmbeddingTables.renew` gives it to an id,
    and then gets the initial values of the id's key. Such a table has no ``row_keys`` and no SSE.

    Raises:
        ValueError: settings that do not go together, naming the table and the setting.

    Example:
        >>> from embeddings import InitConfig, TableConfig
        >>> item = TableConfig("item", 1000, 16, ("item", "history"), pooling="mean", init=InitConfig("normal", 0.01))
        >>> item.first_live_row  # ids of a live row begin here
        2
    """

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]
    pooling: Pooling | Mapping[str, Pooling] | Sequence[Pooling] = "sum"
    init: InitConfig = InitConfig()
    first_live_row: int = 2
    row_start: int = 0
    row_count: int = -1
    column_start: int = 0
    total_dim: int = 0
    row_keys: np.ndarray | None = field(default=None, compare=False, repr=False)
    grows: bool = False

    def __post_init__(self) -> None:
        where = f"table '{self.name}'"
        if self.num_rows < 1 or self.dim < 1:
            raise ValueError(f"{where}: num_rows and dim must be at least 1, not {self.num_rows} and {self.dim}")
        features = (self.features,) if isinstance(self.features, str) else tuple(self.features)
        object.__setattr__(self, "features", features)
        if not features or len(set(features)) != len(features):
            raise ValueError(f"{where}: features must be at least one, each named once, not {features}")
        object.__setattr__(self, "pooling", self._poolings(where))
        if self.row_count == -1:
            object.__setattr__(self, "row_count", self.num_rows - self.row_start)
        if not (self.row_start >= 0 and self.row_count >= 0 and self.row_start + self.row_count <= self.num_rows):
            raise ValueError(
                f"{where}: rows [{self.row_start}, {self.row_start + self.row_count}) are not in [0, {self.num_rows})"
            )
        if self.total_dim == 0:
            object.__setattr__(self, "total_dim", self.column_start + self.dim)
        if not 0 <= self.column_start <= self.total_dim - self.dim:
            raise ValueError(
                f"{where}: columns [{self.column_start}, {self.column_start + self.dim}) are not in "
                f"[0, {self.total_dim}): total_dim is the dim of the whole table"
            )
        if self.first_live_row < 0:
            raise ValueError(f"{where}: first_live_row must be at least 0, not {self.first_live_row}")
        if self.grows and (self.init.kind == "normal" or self.row_keys is not None):
            raise ValueError(
                f"{where} grows: a row's number does not determine its id, and keys come with the ids: use init "
                "'hash' or 'zero', and no row_keys"
            )
        if self.init.kind == "hash" and self.row_keys is None and not self.grows:
            raise ValueError(f"{where}: init 'hash' needs row_keys, one uint64 for each row")
        if self.row_keys is not None and len(self.row_keys) not in (self.num_rows, self.row_count):
            raise ValueError(
                f"{where}: row_keys has {len(self.row_keys)} entries for {self.num_rows} rows "
                f"({self.row_count} in this shard)"
            )

    def _poolings(self, where: str) -> tuple[Pooling, ...]:
        if isinstance(self.pooling, str):
            poolings: tuple[Pooling, ...] = (self.pooling,) * len(self.features)
        elif isinstance(self.pooling, Mapping):
            if set(self.pooling) != set(self.features):
                raise ValueError(
                    f"{where}: pooling names {sorted(self.pooling)}, the features are {sorted(self.features)}"
                )
            poolings = tuple(self.pooling[feature] for feature in self.features)
        else:
            poolings = tuple(self.pooling)
        if len(poolings) != len(self.features) or any(pooling not in POOLINGS for pooling in poolings):
            raise ValueError(
                f"{where}: pooling must be sum, mean or none for each of {len(self.features)} features, not {poolings}"
            )
        return poolings

    @property
    def whole(self) -> bool:
        """True if this shard holds every row of the table."""
        return self.row_count == self.num_rows

    @property
    def padding_row(self) -> int:
        """The local number of the padding row; -1 if this shard does not hold it."""
        return 0 if self.first_live_row > 0 and self.row_start == 0 else -1

    @property
    def local_keys(self) -> np.ndarray | None:
        """The keys of the rows held here, uint64 [row_count]."""
        if self.row_keys is None:
            return None
        keys = np.asarray(self.row_keys, dtype=np.uint64)
        return keys if len(keys) == self.row_count else keys[self.row_start : self.row_start + self.row_count]
