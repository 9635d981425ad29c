"""The ways to split a table over ranks: what each is called, what a rank then holds, who may choose it. Torch-free.

A way is an entry here, and the classes of that way in ``embeddings.sharding``: one for bags and, where
``for_sequences``, one for sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Over = Literal["", "ranks", "host", "hosts"]
"""Over what rows or columns are split: nothing, all ranks, the ranks of one host, or hosts."""


@dataclass(frozen=True)
class Sharding:
    """A way to split a table over ranks. A host is a block of ranks that exchange fast with each other.

    Args:
        name: as jobs and plans write it.
        torchrec_name: TorchRec's word, where it has another.
        rows_over: over what rows are split; ids of such tables are swapped before they are distributed.
        columns_over: over what columns are split; each shard looks every id up again.
        replicated: whether every rank holds all rows.
        for_sequences: whether tables that are not pooled can be split so.
        in_jobs: whether a job may ask for it.
        by_planner: whether the planner chooses it where nothing is asked for.
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
        """Whether it needs hosts with equally many ranks."""
        return bool({self.rows_over, self.columns_over} & {"host", "hosts"})

    def row_shards(self, world_size: int, local_size: int) -> int:
        """Return into how many parts rows are split over ``world_size`` ranks, ``local_size`` on each host."""
        return _parts(self.rows_over, world_size, local_size)

    def column_shards(self, world_size: int, local_size: int) -> int:
        """Return into how many parts columns are split, where there are enough of them."""
        return _parts(self.columns_over, world_size, local_size)

    def largest_share(self, rows: int, dim: int, world_size: int) -> tuple[int, int]:
        """Return (rows, columns) on the rank that holds most of a table. All ranks count as those of one host."""
        parts = self.row_shards(world_size, world_size)
        return -(-rows // parts), shard_columns(dim, self.column_shards(world_size, world_size))


def _parts(over: Over, world_size: int, local_size: int) -> int:
    return {"": 1, "ranks": world_size, "host": local_size, "hosts": world_size // local_size}[over]


def shard_columns(dim: int, num_shards: int) -> int:
    """Return the fewest columns of equal shards, of which there are at most ``num_shards``.

    It is a multiple of four, as TorchRec wants it, or all of them.
    """
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
    """Return the names of the ways to split tables of bags, or of sequences."""
    return tuple(name for name, sharding in SHARDINGS.items() if sharding.for_sequences or not sequences)


def sharding_name(torchrec_type: str) -> str:
    """Return our word for a value of TorchRec's ShardingType."""
    return next((name for name, one in SHARDINGS.items() if one.torchrec_type == torchrec_type), torchrec_type)
