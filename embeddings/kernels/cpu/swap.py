"""Compiled SSE: swaps of a block of samples inside the lookup, or of a whole feature ahead of it."""

from __future__ import annotations

import numpy as np
from numba import prange

from embeddings.kernels.cpu.bags import one_each
from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.philox import LANES, draw_below, lane_of, lowest_bit, philox4x32, philox_hits
from embeddings.kernels.cpu.threads import BLOCK, use_threads
from embeddings.sse import HIT_STREAM, NEIGHBOUR_STREAM, ROW_STREAM, SwapDraws

_MASK, _POSITION_MASK, _ONE = np.uint64(0xFFFFFFFF), np.uint64(0xFFFF), np.uint64(1)
_HIT_STREAM, _ROW_STREAM, _NEIGHBOUR_STREAM = np.uint64(HIT_STREAM), np.uint64(ROW_STREAM), np.uint64(NEIGHBOUR_STREAM)


@compiled()
def new_row(row, step, group, place, lane, draws, graph_offsets, neighbours, thresholds):  # type: ignore[no-untyped-def]
    """What a hit becomes: see embeddings.sse. ``graph_offsets`` and the rest are those of SwapDraws."""
    key0, key1, num_others, first_live = draws[2], draws[3], draws[4], np.int64(draws[5])
    graph = np.int64(draws[6]) - 1
    first = last = np.int64(0)
    if graph >= 0:
        first, last = graph_offsets[graph + row], graph_offsets[graph + row + 1]
    stop = draws[8]
    if last > first and stop > 0:
        here, from_row, stream = row, (first, last), np.uint64(0)
        while True:
            drawn = draw_below(step, group, place, _ROW_STREAM + stream, lane, key0, key1, np.uint64(last - first))
            here = np.int64(neighbours[first + drawn])
            if here != row:
                word = lane_of(philox4x32(step, group, place, _NEIGHBOUR_STREAM + stream, key0, key1), lane)
                if word < stop:
                    return here
            first, last = graph_offsets[graph + here], graph_offsets[graph + here + 1]
            if first == last:
                first, last = from_row
            stream += _ONE
    if last > first:
        word = lane_of(philox4x32(step, group, place, _NEIGHBOUR_STREAM, key0, key1), lane)
        if word < thresholds[np.int64(draws[7]) + last - first]:
            drawn = draw_below(step, group, place, _ROW_STREAM, lane, key0, key1, np.uint64(last - first))
            return np.int64(neighbours[first + drawn])
    stream = _ROW_STREAM
    while True:
        drawn = draw_below(step, group, place, stream, lane, key0, key1, num_others)
        other = first_live + drawn + (1 if drawn >= row - first_live else 0)
        low, high = first, last
        while low < high:
            middle = (low + high) >> 1
            if neighbours[middle] < other:
                low = middle + 1
            else:
                high = middle
        if low == last or neighbours[low] != other:
            return other
        stream += _ONE


@compiled()
def swap_block(  # type: ignore[no-untyped-def]
    indices, used, offsets, single, first_bag, start, end, sample_offset, step, draws, graph_offsets, neighbours,
    thresholds,
):  # fmt: skip
    """SSE of the bags [start, end) of one feature, bit for bit as embeddings.sse.swap; ``draws``: its SwapDraws.words.

    single: whether each of them has exactly one id.

    Rows outside [first live row, number of rows) stay: one unsigned comparison finds both.
    """
    threshold, place, key0, key1 = draws[0], draws[1], draws[2], draws[3]
    num_others, first_live = draws[4], np.int64(draws[5])
    first_id = offsets[first_bag + start]
    if single:
        # The usual case: a draw for four samples, eight draws at a time. Only those that hit are looked at one by one.
        count = end - start
        for i in range(first_id, first_id + count):
            used[i] = indices[i]
        group = (sample_offset + start) >> 2
        skip = sample_offset + start - 4 * group
        for lane in range(0, skip + count if threshold > 0 else 0, LANES):
            hits = philox_hits(step, np.uint64(group + (lane >> 2)), place, _HIT_STREAM, key0, key1, threshold)
            while hits != 0:
                j = lane + lowest_bit(hits) - skip
                hits &= hits - np.uint32(1)
                if 0 <= j < count:
                    row = np.int64(indices[first_id + j])
                    if np.uint64(row - first_live) <= num_others:
                        sample = sample_offset + start + j
                        group_word = np.uint64(sample >> 2) & _MASK
                        used[first_id + j] = new_row(
                            row, step, group_word, place, sample & 3, draws, graph_offsets, neighbours, thresholds
                        )  # fmt: skip
        return
    group = (sample_offset + start) >> 2
    while group * 4 < sample_offset + end:
        low = max(group * 4, sample_offset + start)
        high = min(group * 4 + 4, sample_offset + end)
        longest = 0
        for sample in range(low, high):
            bag = first_bag + sample - sample_offset
            longest = max(longest, offsets[bag + 1] - offsets[bag])
        for position in range(longest):
            at = place | (np.uint64(position) & _POSITION_MASK)
            words = philox4x32(step, np.uint64(group) & _MASK, at, _HIT_STREAM, key0, key1)
            for sample in range(low, high):
                bag = first_bag + sample - sample_offset
                i = offsets[bag] + position
                if i < offsets[bag + 1]:
                    row = indices[i]
                    if np.uint64(row - first_live) <= num_others and lane_of(words, sample & 3) < threshold:
                        group_word = np.uint64(group) & _MASK
                        row = new_row(
                            row, step, group_word, at, sample & 3, draws, graph_offsets, neighbours, thresholds
                        )  # fmt: skip
                    used[i] = row
        group += 1


@compiled(parallel=True)
def _swap_feature(  # type: ignore[no-untyped-def]
    indices, used, offsets, sample_offset, step, words, graph_offsets, neighbours, thresholds
):  # fmt: skip
    batch_size = offsets.size - 1
    for block in prange((batch_size + BLOCK - 1) // BLOCK):
        start, end = block * BLOCK, min(block * BLOCK + BLOCK, batch_size)
        swap_block(
            indices, used, offsets, one_each(offsets, start, end), 0, start, end, sample_offset, step, words[0],
            graph_offsets, neighbours, thresholds,
        )  # fmt: skip


def swap_feature(ids: np.ndarray, offsets: np.ndarray, draws: SwapDraws, step: int, sample_offset: int) -> np.ndarray:
    """Compiled form of :func:`embeddings.sse.swap`; ``draws`` of the one feature, ``offsets`` from 0."""
    if (np.diff(offsets) < 0).any() or int(offsets[-1]) != len(ids):
        raise ValueError(f"offsets must not decrease and must end at the number of ids, {len(ids)}")
    use_threads(8 * len(ids))
    used = np.empty_like(ids)
    _swap_feature(ids, used, offsets, sample_offset, np.uint64(step & 0xFFFFFFFF), *draws)
    return used
