"""Stochastic rounding of half-precision rows, so that steps below half a unit in the last place are not lost.

The draw of an element depends on the step, the table, and its row and column in the whole table: every backend and
every sharding plan stores the same bits. Key (seed, crc32(table name)), counter (step, row, row >> 32 << 16 |
column >> 2, STREAM), lane column & 3 (see :mod:`embeddings.tables.philox`). Numpy only.
"""

from __future__ import annotations

import numpy as np

from embeddings.tables.philox import LANES, philox4x32

STREAM = 0x40000000


def rounding_words(
    key: tuple[int, int], step: int, rows: np.ndarray, column_start: int, num_columns: int
) -> np.ndarray:
    """Return a 32-bit word for each element, uint32 [n, num_columns].

    ``rows`` and ``column_start`` count in the whole table, not in a shard.
    """
    first, end = column_start // LANES, (column_start + num_columns - 1) // LANES + 1
    rows = rows.astype(np.uint64)[:, None]
    quads = (rows >> np.uint64(32)) << np.uint64(16) | np.arange(first, end, dtype=np.uint64)[None, :]
    words = np.stack(philox4x32((step, rows, quads, STREAM), key), axis=-1).reshape(len(rows), LANES * (end - first))
    skip = column_start - first * LANES
    return words[:, skip : skip + num_columns].astype(np.uint32)


def to_bfloat16(values: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Round float32 stochastically to bfloat16, returned as uint16 bits.

    A value is rounded away from zero if its lower 16 bits plus those of its random word carry.
    """
    bits: np.ndarray = (values.view(np.uint32) + (words & np.uint32(0xFFFF))) >> np.uint32(16)
    return bits.astype(np.uint16)


def to_float16(values: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Round float32 stochastically to one of the two adjacent float16 values.

    A value is rounded away from zero if its word is below 2^32 times its relative distance from the one nearer to 0.
    """
    finite = np.isfinite(values)
    size = np.where(finite, np.abs(values), np.float32(0))
    # The spacing of float16 values: 2^(e - 10), or 2^-24 for subnormal ones. Dividing by it is exact.
    exponent = (size.view(np.uint32) >> np.uint32(23)).astype(np.int32)
    unit = ((np.maximum(exponent, 113) - 10) << 23).view(np.float32)
    below = np.floor(size / unit)
    up = ((size / unit - below) * np.float32(2**32)).astype(np.int64) > words.astype(np.int64)
    rounded = (below + up.astype(np.float32)) * unit
    with np.errstate(over="ignore"):
        return np.where(finite, np.copysign(rounded, values), values).astype(np.float16)
