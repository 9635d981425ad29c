"""Columns of the feature description given to compiled code, int64 [F, 11].

FIRST is the first row that adds something (1 after a padding row, else 0), LIVE how many do: one unsigned comparison,
``uint64(row - FIRST) < LIVE``, leaves out both padding and ids outside the table. ROW_BITS is
how many bits row numbers have.
"""

from __future__ import annotations

from collections.abc import Iterable

TABLE, COLUMN, DIM, MEAN, ROWS, FIRST, LIVE, WEIGHT_BASE, VECTOR_BASE, STEP_BASE, ROW_BITS = range(11)

# Row lengths that have code of their own: loops over a row are unrolled, and a step takes a tenth less.
SPECIAL_DIMS = (16, 32, 64, 128)


def special_dim(dims: Iterable[int]) -> int:
    """The dim of all tables where it is one of SPECIAL_DIMS, which compiled code is then made for; else 0: of any."""
    one, *others = set(dims)
    return one if not others and one in SPECIAL_DIMS else 0
