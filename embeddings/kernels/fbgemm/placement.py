"""Placement of FBGEMM's tables: in a GPU's memory, or in the host's with a cache of rows on the GPU. Torch-free.

This module only computes sizes. embeddings.kernels.fbgemm.module places tables by them, and trainer.sizing.memory
refuses jobs that do not fit. Rows and state are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FOR_TABLES = 0.8
"""Share of the memory of a GPU or host for tables; the rest is for the dense part, batches and allocators' waste."""

CACHED_SHARE = 0.2
"""Share of the rows that a cache holds: FBGEMM's own default (cache_load_factor)."""

# Rows of a set of FBGEMM's cache (DEFAULT_ASSOC of its CUDA build), and bytes of a cached row besides its weights: its
# number and the time of its last use, both int64.
_ROWS_OF_A_SET = 32
_CACHED_ROW_BYTES = 16
# Bytes on the GPU for every row of a cached table: FBGEMM's map from rows to tables, and our step of the last touch.
_ROW_BYTES = 8
_STEP_BYTES = _FLOAT_BYTES = 4


class Placement(NamedTuple):
    """Size of FBGEMM's cache for a set of tables, and the memory that the tables need on GPU and host.

    Attributes:
        cache_sets: number of sets in FBGEMM's cache, 32 rows each; 0 if the tables are on the GPU and need no cache.
        gpu_bytes, host_bytes: bytes of tables, optimizer state and cache in each memory.
    """

    cache_sets: int
    gpu_bytes: int
    host_bytes: int


def place(shapes: Sequence[tuple[int, int]], num_vectors: int, num_numbers: int, gpu_bytes: int) -> Placement:
    """Place tables of ``shapes`` (rows, dim), given ``gpu_bytes`` of GPU memory for them.

    All tables are on the GPU if they fit. Else rows and state vectors are in the host's memory, and the GPU caches a
    fifth of the rows, or as many as fit. The cache has at least one set, so ``gpu_bytes`` of the result may exceed the
    argument.

    Args:
        shapes: (number of rows, dim) of each table.
        num_vectors: state vectors for each row, as wide as the row.
        num_numbers: single numbers of state for each row.
        gpu_bytes: bytes of GPU memory that tables may take.
    """
    rows = sum(count for count, _ in shapes)
    wide = sum(count * dim for count, dim in shapes) * _FLOAT_BYTES * (1 + num_vectors)
    whole = wide + rows * (num_numbers * _FLOAT_BYTES + _STEP_BYTES)
    if whole <= gpu_bytes:
        return Placement(0, whole, 0)
    kept = rows * (num_numbers * _FLOAT_BYTES + _ROW_BYTES)
    # Every row of the cache is as wide as the widest table.
    set_bytes = _ROWS_OF_A_SET * (max(dim for _, dim in shapes) * _FLOAT_BYTES + _CACHED_ROW_BYTES)
    wanted = -(-int(CACHED_SHARE * rows) // _ROWS_OF_A_SET)
    sets = max(1, min(wanted, (gpu_bytes - kept) // set_bytes))
    return Placement(sets, kept + sets * set_bytes, wide)
