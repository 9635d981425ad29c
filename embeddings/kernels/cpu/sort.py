"""Which gradients a step sums for which row: a stable sort of the looked-up ids by table and row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import prange

from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import COLUMN, FIRST, LIVE
from embeddings.kernels.cpu.lookup import share_of
from embeddings.kernels.cpu.threads import BLOCK

# Entries that one task of the update sorts: both buffers stay in the second-level cache.
STRIPE = 4096
RADIX_BITS = 9


@compiled(parallel=True)
def entries_of(slots, indices, offsets, scales, batch_size, first_bag, total_dim, rows, places, shares):  # type: ignore[no-untyped-def]
    """For each looked-up id its row (-1: not touched), where its gradient starts, and its weight."""
    num_blocks = (batch_size + BLOCK - 1) // BLOCK
    for task in prange(slots.shape[0] * num_blocks):
        f, block = task // num_blocks, task % num_blocks
        for b in range(block * BLOCK, min(block * BLOCK + BLOCK, batch_size)):
            first, last = offsets[f * batch_size + b], offsets[f * batch_size + b + 1]
            share = share_of(indices, first, last, slots, f)
            for i in range(first, last):
                scale = share * (scales[i] if scales.size else 1.0)
                touched = np.uint64(indices[i] - slots[f, FIRST]) < np.uint64(slots[f, LIVE]) and scale != 0.0
                rows[i] = indices[i] if touched else -1
                places[i] = (first_bag + b) * total_dim + slots[f, COLUMN]
                shares[i] = scale


@compiled(parallel=True)
def partition(rows, ranges, masks, blocks, counts, order):  # type: ignore[no-untyped-def]
    """Stably sorts the entries of each block of a table by stripe (row & mask).

    ranges: int64 [blocks, 3], (table, first entry, end) in order. counts: int64 [blocks, stripes], zeroed. Gives in
    ``order`` the entries of table 0 stripe 0, table 0 stripe 1, ..., each in their original order.
    """
    num_blocks = ranges.shape[0]
    for block in prange(num_blocks):
        mask = masks[ranges[block, 0]]
        for i in range(ranges[block, 1], ranges[block, 2]):
            if rows[i] >= 0:
                counts[block, rows[i] & mask] += 1
    total = 0
    for t in range(masks.size):
        for stripe in range(masks[t] + 1):
            blocks[t, stripe] = total
            for block in range(num_blocks):
                if ranges[block, 0] == t:
                    count = counts[block, stripe]
                    counts[block, stripe] = total
                    total += count
        blocks[t, masks[t] + 1] = total
    for block in prange(num_blocks):
        mask = masks[ranges[block, 0]]
        for i in range(ranges[block, 1], ranges[block, 2]):
            if rows[i] >= 0:
                stripe = rows[i] & mask
                order[counts[block, stripe]] = i
                counts[block, stripe] += 1


@compiled()
def sort_by_row(order, rows, num_rows, shift):  # type: ignore[no-untyped-def]
    """Stable radix sort of entry numbers by their row, of which the lowest ``shift`` bits are equal."""
    n = order.size
    keys, other_keys = np.empty(n, np.int64), np.empty(n, np.int64)
    other = np.empty(n, order.dtype)
    for i in range(n):
        keys[i] = rows[order[i]]
    starts = np.empty(1 << RADIX_BITS, np.int64)
    while (num_rows - 1) >> shift > 0:
        starts[:] = 0
        for i in range(n):
            starts[(keys[i] >> shift) & ((1 << RADIX_BITS) - 1)] += 1
        total = 0
        for digit in range(starts.size):
            count = starts[digit]
            starts[digit] = total
            total += count
        for i in range(n):
            digit = (keys[i] >> shift) & ((1 << RADIX_BITS) - 1)
            other[starts[digit]] = order[i]
            other_keys[starts[digit]] = keys[i]
            starts[digit] += 1
        order, other = other, order
        keys, other_keys = other_keys, keys
        shift += RADIX_BITS
    return order, keys


def plan_tasks(rows: np.ndarray, spans: Sequence[Sequence[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Entries grouped by table and stripe; a task for each group: int64 [tasks, 4] (table, first, end, equal bits)."""
    counts = [sum(end - first for first, end in table) for table in spans]
    bits = [min(10, max(0, (count - 1) // STRIPE).bit_length()) for count in counts]
    masks = np.array([(1 << b) - 1 for b in bits], dtype=np.int64)
    ranges = [
        (t, at, min(at + STRIPE * 4, end))
        for t, table in enumerate(spans)
        for first, end in table
        for at in range(first, end, STRIPE * 4)
    ]
    stripes = int(masks.max()) + 1
    bounds = np.zeros((len(spans), stripes + 1), dtype=np.int64)
    order = np.empty(rows.size, dtype=np.int64)
    block_counts = np.zeros((len(ranges), stripes), dtype=np.int64)
    partition(rows, np.array(ranges, dtype=np.int64).reshape(-1, 3), masks, bounds, block_counts, order)
    tasks = [
        (t, bounds[t, stripe], bounds[t, stripe + 1], bits[t])
        for t in range(len(spans))
        for stripe in range(1 << bits[t])
    ]
    return order, np.array(tasks, dtype=np.int64)
