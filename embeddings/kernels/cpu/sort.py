"""Which gradients a step sums for which row: the looked-up ids of all tables, sorted by table and row.

An entry is one looked-up id. Its key has the row in the upper bits and in the lower ones where its gradient starts
(``direct``), or, where entries have weights, the number of the entry. Where tables are large, or threads many, keys go
to buckets by the leading bits of their row first, each of which is sorted by one thread, and so is the whole in the
order of rows. Sorting is stable: the keys of a row stay in the order of the batch.
"""

from __future__ import annotations

import numpy as np
from numba import get_thread_id, prange

from embeddings.kernels.cpu.bags import one_each, share_of
from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.geometry import COLUMN, FIRST, LIVE, ROW_BITS, TABLE

# Keys of a bucket at most, on average: both buffers of its sort stay in the second-level cache.
BUCKET = 1 << 13
MAX_BUCKET_BITS = 10
# Sorting 4096 keys by 18 bits takes two passes of 9 bits 11 us. Finer buckets and insertion took 30: a branch that goes
# wrong for every second key. Up to INSERTION keys its square is less than the zeroing of 2 ** DIGIT_BITS counts.
DIGIT_BITS = 11
INSERTION = 32
# The key of an id that touches nothing.
UNTOUCHED = np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled(parallel=True)
def build_keys(  # type: ignore[no-untyped-def]
    slots, pooled, indices, offsets, scales, batch_size, block_size, first_entry, first_output, first_block, total_dim,
    place_bits, direct, bucket_bits, keys, places, shares, blocks, counts,
):  # fmt: skip
    """The keys of one record, and how many of each block fall into each bucket.

    keys, places, shares: of all entries, this record's from ``first_entry``; the last two only where not ``direct``.
    blocks: int64 [blocks, 3], (table, first entry, end); counts: int32 [blocks, buckets]; this record's from
    ``first_block``. first_output: where this record's gradient starts, in rows of ``total_dim``.
    """
    num_blocks = (batch_size + block_size - 1) // block_size
    for task in prange(slots.shape[0] * num_blocks):
        f, block, mine = task // num_blocks, task % num_blocks, first_block + task
        start, end = block * block_size, min(block * block_size + block_size, batch_size)
        first_bag, end_bag = f * batch_size + start, f * batch_size + end
        first_id, end_id = np.int64(offsets[first_bag]), np.int64(offsets[end_bag])
        blocks[mine, 0], blocks[mine, 1], blocks[mine, 2] = (
            slots[f, TABLE],
            first_entry + first_id,
            first_entry + end_id,
        )
        first_row, live = slots[f, FIRST], np.uint64(slots[f, LIVE])
        shift = np.uint64(max(0, slots[f, ROW_BITS] - bucket_bits))
        bits = np.uint64(place_bits)
        for bucket in range(1 << bucket_bits):
            counts[mine, bucket] = 0
        if direct and (not pooled or one_each(offsets, first_bag, end_bag)):
            place = (first_output + (start if pooled else first_id)) * total_dim + slots[f, COLUMN]
            for i in range(first_id, end_id):
                row = np.int64(indices[i])
                if np.uint64(row - first_row) < live:
                    keys[first_entry + i] = (np.uint64(row) << bits) | np.uint64(place)
                    counts[mine, np.uint64(row) >> shift] += 1
                else:
                    keys[first_entry + i] = UNTOUCHED
                place += total_dim
            continue
        for b in range(start, end):
            first, last = np.int64(offsets[f * batch_size + b]), np.int64(offsets[f * batch_size + b + 1])
            share = share_of(indices, first, last, slots, f)
            for i in range(first, last):
                row, low = np.int64(indices[i]), first_entry + i
                touched = np.uint64(row - first_row) < live
                place = (first_output + (b if pooled else i)) * total_dim + slots[f, COLUMN]
                if direct:
                    low = place
                else:
                    scale = shares.dtype.type(share)
                    if scales.size:
                        scale *= scales[i]
                    touched &= scale != 0.0
                    places[first_entry + i], shares[first_entry + i] = place, scale
                if touched:
                    keys[first_entry + i] = (np.uint64(row) << bits) | np.uint64(low)
                    counts[mine, np.uint64(row) >> shift] += 1
                else:
                    keys[first_entry + i] = UNTOUCHED


@compiled()
def _plan(row_bits, slot_ranges, spans, bucket_bits, keys_per_task, counts, ends, tasks):  # type: ignore[no-untyped-def]
    """Turns counts into where each block's keys of a bucket go; fills ``ends`` and ``tasks``, and counts the tasks."""
    total = task = np.int64(0)
    for t in range(row_bits.size):
        first, first_bucket = total, 0
        num_buckets = 1 << min(bucket_bits, row_bits[t])
        for bucket in range(num_buckets):
            for r in range(spans.shape[0]):
                for block in range(
                    spans[r, 0] + slot_ranges[t] * spans[r, 1], spans[r, 0] + slot_ranges[t + 1] * spans[r, 1]
                ):
                    count = counts[block, bucket]
                    counts[block, bucket] = total
                    total += count
            ends[t, bucket] = total
            if total > first and (total - first >= keys_per_task or bucket == num_buckets - 1):
                tasks[task, 0], tasks[task, 1], tasks[task, 2] = t, first, total
                tasks[task, 3], tasks[task, 4] = first_bucket, bucket + 1
                task, first, first_bucket = task + 1, total, bucket + 1
    return task


@compiled()
def _insertion_sort(keys, first, end, lowest):  # type: ignore[no-untyped-def]
    """Stable, by the bits from ``lowest``."""
    bits = np.uint64(lowest)
    for i in range(first + 1, end):
        key, j = keys[i], i
        while j > first and keys[j - 1] >> bits > key >> bits:
            keys[j] = keys[j - 1]
            j -= 1
        keys[j] = key


@compiled()
def _radix_sort(keys, other, first, end, lowest, num_bits, starts):  # type: ignore[no-untyped-def]
    """Stable, by bits [lowest, lowest + num_bits); ``other`` is room for as many keys at the same places."""
    num_passes = (num_bits + DIGIT_BITS - 1) // DIGIT_BITS
    digit_bits = (num_bits + num_passes - 1) // max(num_passes, 1)
    mask = np.uint64((1 << digit_bits) - 1)
    source, target = keys, other
    for passed in range(num_passes):
        shift = np.uint64(lowest + passed * digit_bits)
        starts[: 1 << digit_bits] = 0
        for i in range(first, end):
            starts[(source[i] >> shift) & mask] += 1
        total = first
        for digit in range(1 << digit_bits):
            count = starts[digit]
            starts[digit] = total
            total += count
        for i in range(first, end):
            digit = (source[i] >> shift) & mask
            target[starts[digit]] = source[i]
            starts[digit] += 1
        source, target = target, source
    if num_passes % 2:
        for i in range(first, end):
            keys[i] = other[i]


@compiled()
def _find_runs(keys, first, end, lowest, runs):  # type: ignore[no-untyped-def]
    """Where the keys of each row end, at ``runs[first:]``; gives the number of rows.

    Without a branch, which would go wrong for every second key, here or, more expensively, where rows are updated.
    """
    bits, run = np.uint64(lowest), first
    for i in range(first, end - 1):
        runs[run] = i + 1
        run += np.int64(keys[i] >> bits != keys[i + 1] >> bits)
    runs[run] = end
    return run + 1 - first


@compiled(parallel=True)
def sort_keys(  # type: ignore[no-untyped-def]
    row_bits, slot_ranges, spans, num_blocks, blocks, bucket_bits, place_bits, keys_per_task, counts, keys, ordered,
    ends, tasks, digits, runs,
):  # fmt: skip
    """Sorts ``keys`` into ``ordered`` (touched ones only) and cuts them into tasks, of which it gives the number.

    row_bits: int64 [T]. slot_ranges: int64 [T + 1], the first feature of each table. spans: int64 [records, 2], (first
    block, blocks of a feature). ends: int64 [T, buckets]. tasks: int64 [T + num_keys / keys_per_task, 5]: (table, first
    key, end, first bucket, end), a row's keys in one task; the last number then becomes how many rows the task has.
    runs: int64, of all entries: where the keys of each row of a task end, from the task's first key on. digits: int64
    [threads, 2 ** DIGIT_BITS], to work with.
    """
    num_tasks = _plan(row_bits, slot_ranges, spans, bucket_bits, keys_per_task, counts, ends, tasks)
    for block in prange(num_blocks):
        shift = np.uint64(place_bits + max(0, row_bits[blocks[block, 0]] - bucket_bits))
        for i in range(blocks[block, 1], blocks[block, 2]):
            key = keys[i]
            if key != UNTOUCHED:
                place = counts[block, key >> shift]
                ordered[place] = key
                counts[block, key >> shift] = place + 1
    for task in prange(num_tasks):
        t, first = tasks[task, 0], tasks[task, 1]
        num_bits = max(0, row_bits[t] - bucket_bits)
        for bucket in range(tasks[task, 3], tasks[task, 4]):
            end = ends[t, bucket]
            if end - first > INSERTION:
                _radix_sort(ordered, keys, first, end, place_bits, num_bits, digits[get_thread_id()])
            else:
                _insertion_sort(ordered, first, end, place_bits)
            first = end
        tasks[task, 4] = _find_runs(ordered, tasks[task, 1], tasks[task, 2], place_bits, runs)
    return num_tasks
