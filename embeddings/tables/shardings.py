"""Shardings: the ways to split a table over ranks, their names and the parts that a rank holds. Torch-free.

A sharding is an entry here, and its classes in ``embeddings.sharding``: a class for bags and, with ``for_sequences``, a
class for sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Over = Literal["", "ranks", "host", "hosts"]
"""Set over which rows or columns are split: none, all ranks, the ranks of one host, or the hosts."""


@dataclass(frozen=True)
class Sharding:
    """A way to split a table over ranks. A host is a block of ranks that exchange fast with each other.

    Args:
        torchrec_name: TorchRec's name, if it differs.
        rows_over: the ranks over which rows are split; SSE swaps ids of such tables before they are distributed.
        columns_over: the ranks over which columns are split; each column shard looks up every id again.
        for_sequences: True if tables without pooling can be split in this way.
        in_jobs: True if a job may ask for this sharding.
        by_planner: True if the planner may choose it for a job that asks for no sharding.
    """

    name: str
    torchrec_name: str = ""
    rows_over: Over = ""
    columns_over: Over = ""
    replicated: bool = False
    for_sequences: bool = False
    in_jobs: bool = True
    by_planner: bool = False

    @property
    def torchrec_type(self) -> str:
        """The value of TorchRec's ShardingType."""
        return self.torchrec_name or self.name

    @property
    def needs_equal_hosts(self) -> bool:
        """True if it needs the same number of ranks on every host, as shardings over one host or over hosts do."""
        return bool({self.rows_over, self.columns_over} & {"host", "hosts"})

    def row_shards(self, world_size: int, local_size: int) -> int:
        """Return the number of parts of the rows on ``world_size`` ranks, ``local_size`` on each host."""
        return _parts(self.rows_over, world_size, local_size)

    def column_shards(self, world_size: int, local_size: int) -> int:
        """Return the number of parts of the columns, given enough columns."""
        return _parts(self.columns_over, world_size, local_size)

    def largest_share(self, rows: int, dim: int, world_size: int) -> tuple[int, int]:
        """Return (rows, columns) on the rank that holds most of a table. All ranks count as ranks of one host."""
        parts = self.row_shards(world_size, world_size)
        return -(-rows // parts), shard_columns(dim, self.column_shards(world_size, world_size))


def _parts(over: Over, world_size: int, local_size: int) -> int:
    return {"": 1, "ranks": world_size, "host": local_size, "hosts": world_size // local_size}[over]


def shard_columns(dim: int, num_shards: int) -> int:
    """Return the width of at most ``num_shards`` equal column shards: a multiple of four (TorchRec), or dim."""
    fits = (width for width in range(-(-dim // num_shards), dim) if dim % width == 0 and width % 4 == 0)
    return next(fits, dim)


TABLE_WISE = Sharding("table_wise", for_sequences=True, by_planner=True)
ROW_WISE = Sharding("row_wise", rows_over="ranks", for_sequences=True, by_planner=True)
COLUMN_WISE = Sharding("column_wise", columns_over="ranks", for_sequences=True)
DATA_PARALLEL = Sharding("data_parallel", replicated=True, for_sequences=True, by_planner=True)
TABLE_ROW_WISE = Sharding("table_row_wise", rows_over="host")
TABLE_COLUMN_WISE = Sharding("table_column_wise", columns_over="host", in_jobs=False)
GRID = Sharding("grid", "grid_shard", rows_over="host", columns_over="hosts")

SHARDINGS: dict[str, Sharding] = {
    sharding.name: sharding
    for sharding in (TABLE_WISE, ROW_WISE, COLUMN_WISE, DATA_PARALLEL, TABLE_ROW_WISE, TABLE_COLUMN_WISE, GRID)
}


def shardings_for(*, sequences: bool) -> tuple[str, ...]:
    """Return the names of the shardings for bags, or for sequences."""
    return tuple(name for name, sharding in SHARDINGS.items() if sharding.for_sequences or not sequences)


def sharding_name(torchrec_type: str) -> str:
    """Return our name for a value of TorchRec's ShardingType."""
    return next((name for name, one in SHARDINGS.items() if one.torchrec_type == torchrec_type), torchrec_type)
