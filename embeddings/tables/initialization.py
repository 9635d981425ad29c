"""Initial rows, a pure function of seed, table, row number or key, and column: shards start equal to the whole table.

Standard normals come from Philox4x32-10 by Box and Muller (1958). Four words of one counter make the four columns
4c .. 4c+3 of a row; the counter is (low and high half of the row's number or key, c, a stream of its own), which no SSE
draw uses.
Columns count from the start of the whole table.
"""

from __future__ import annotations

import numpy as np

from embeddings.tables.config import TableConfig
from embeddings.tables.philox import philox4x32, table_key

ROW_STREAM = 0xFFFFFFFE
KEY_STREAM = 0xFFFFFFFF
# Counters at a time: the dozen temporary arrays of Philox then stay in the second-level cache.
_CHUNK = 1 << 14


def initial_rows(table: TableConfig, seed: int, start: int, end: int) -> np.ndarray:
    """Return local rows [start, end) before any training, float64 [end - start, dim]; the padding row is 0."""
    rows = np.zeros((end - start, table.dim))
    if table.init.kind != "zero":
        # Live rows of a dynamic table have no id yet; the row of unknown ids is drawn by its number.
        count = _num_special(table, start, end) if table.grows else end - start
        if table.grows or table.init.kind == "normal":
            identity, stream = np.arange(start, start + count, dtype=np.uint64) + np.uint64(table.row_start), ROW_STREAM
        else:
            keys = table.local_keys
            assert keys is not None
            identity, stream = keys[start:end], KEY_STREAM
        key = table_key(seed, table.name)
        rows[:count] = table.init.std * standard_normal(identity, table.dim, key, stream, table.column_start)
    if start <= table.padding_row < end:
        rows[table.padding_row - start] = 0.0
    return rows


def initial_rows_of(table: TableConfig, seed: int, keys: np.ndarray) -> np.ndarray:
    """Return the initial rows of ids with the given ``keys``, uint64 [n], as float64 [n, dim].

    With init ``hash`` every row with such a key starts with these values; with ``zero`` they are zeros.
    """
    rows = np.zeros((len(keys), table.dim))
    if table.init.kind != "zero":
        key, step = table_key(seed, table.name), _rows_at_a_time(table)
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            rows[part] = standard_normal(keys[part], table.dim, key, KEY_STREAM, table.column_start)
        rows *= table.init.std
    return rows


def standard_normal(
    identity: np.ndarray, dim: int, key: tuple[int, int], stream: int, first_column: int = 0
) -> np.ndarray:
    """Return standard normals, float64 [len(identity), dim].

    Row i depends only on identity[i] (uint64), ``key`` and ``stream``. The columns are ``first_column`` and following
    of the whole row.
    """
    first_group = first_column // 4
    groups = np.arange(first_group, (first_column + dim + 3) // 4, dtype=np.uint64)[None, :]
    low, high = identity & np.uint64(0xFFFFFFFF), identity >> np.uint64(32)
    words = philox4x32((low[:, None], high[:, None], groups, stream), key)
    columns = np.empty((len(identity), groups.shape[1], 4))
    for pair in (0, 2):
        # (word + 1) / 2^32 lies in (0, 1], so the logarithm is finite.
        radius = np.sqrt(-2.0 * np.log((words[pair] + np.uint64(1)) * 2.0**-32))
        angle = words[pair + 1] * (2.0 * np.pi * 2.0**-32)
        columns[..., pair] = radius * np.cos(angle)
        columns[..., pair + 1] = radius * np.sin(angle)
    skip = first_column - 4 * first_group
    return columns.reshape(len(identity), -1)[:, skip : skip + dim]


def chunks(table: TableConfig) -> list[tuple[int, int]]:
    """Return ranges of local rows, each small enough to be initialised without much extra memory."""
    step = _rows_at_a_time(table)
    return [(start, min(start + step, table.row_count)) for start in range(0, table.row_count, step)]


def chunks_to_write(table: TableConfig) -> list[tuple[int, int]]:
    """Return the ranges of local rows that must be written: no ranges with init ``zero``, else those of :func:`chunks`.

    For a dynamic table it is only the rows of padding and unknown ids. Other rows start as zeros, and writing them
    would allocate their memory.
    """
    if table.init.kind == "zero":
        return []
    if not table.grows:
        return chunks(table)
    count = _num_special(table, 0, table.row_count)
    return [(0, count)] if count else []


def _rows_at_a_time(table: TableConfig) -> int:
    return max(1, _CHUNK // max(1, table.dim // 4))


def _num_special(table: TableConfig, start: int, end: int) -> int:
    """Count the padding and unknown-id rows, which come first, among the local rows [start, end)."""
    return max(0, min(end, table.first_live_row - table.row_start) - start)
