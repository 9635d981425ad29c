"""Compiled SSE: swaps of a block of samples inside the lookup, or of a whole feature ahead of it."""

from __future__ import annotations

import numpy as np
from numba import prange

from embeddings.kernels.cpu.compiled import compiled
from embeddings.kernels.cpu.philox import draw_below, lane_of, philox4x32
from embeddings.kernels.cpu.threads import BLOCK, use_threads
from embeddings.sse import HIT_STREAM

_MASK, _POSITION_MASK, _HIT_STREAM = np.uint64(0xFFFFFFFF), np.uint64(0xFFFF), np.uint64(HIT_STREAM)


@compiled()
def swap_block(indices, used, offsets, first_bag, start, end, sample_offset, step, draws):  # type: ignore[no-untyped-def]
    """SSE-SE of the bags [start, end) of one feature, bit for bit as embeddings.sse.swap."""
    threshold, place, key0, key1 = draws[0], draws[1], draws[2], draws[3]
    num_others, first_live = draws[4], np.int64(draws[5])
    first_id = offsets[first_bag + start]
    single = True
    for bag in range(first_bag + start, first_bag + end):
        single &= offsets[bag + 1] - offsets[bag] == 1
    if single:
        # The usual case, one id for each sample, in a loop that the compiler can turn into vectors.
        group = (sample_offset + start) >> 2
        num_groups = ((sample_offset + end - 1) >> 2) + 1 - group
        words = np.empty((BLOCK // 4 + 1, 4), np.uint32)
        for g in range(num_groups):
            w0, w1, w2, w3 = philox4x32(step, np.uint64(group + g) & _MASK, place, _HIT_STREAM, key0, key1)
            words[g, 0], words[g, 1], words[g, 2], words[g, 3] = w0, w1, w2, w3
        flat = words.reshape(-1)
        skip = sample_offset + start - 4 * group
        for j in range(end - start):
            row = indices[first_id + j]
            if flat[skip + j] < threshold and row >= first_live:
                sample = sample_offset + start + j
                drawn = draw_below(step, np.uint64(sample >> 2) & _MASK, place, sample & 3, key0, key1, num_others)
                row = first_live + drawn + (1 if drawn >= row - first_live else 0)
            used[first_id + j] = row
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
                    if row >= first_live and lane_of(words, sample & 3) < threshold:
                        drawn = draw_below(step, np.uint64(group) & _MASK, at, sample & 3, key0, key1, num_others)
                        row = first_live + drawn + (1 if drawn >= row - first_live else 0)
                    used[i] = row
        group += 1


@compiled(parallel=True)
def _swap_feature(indices, used, offsets, sample_offset, step, draws):  # type: ignore[no-untyped-def]
    batch_size = offsets.size - 1
    for block in prange((batch_size + BLOCK - 1) // BLOCK):
        start, end = block * BLOCK, min(block * BLOCK + BLOCK, batch_size)
        swap_block(indices, used, offsets, 0, start, end, sample_offset, step, draws)


def swap_feature(ids: np.ndarray, offsets: np.ndarray, words: np.ndarray, step: int, sample_offset: int) -> np.ndarray:
    """Compiled form of :func:`embeddings.sse.swap`; ``words`` from draw_words, ``offsets`` from 0."""
    if (np.diff(offsets) < 0).any() or int(offsets[-1]) != len(ids):
        raise ValueError(f"offsets must not decrease and must end at the number of ids, {len(ids)}")
    use_threads(8 * len(ids))
    used = np.empty_like(ids)
    _swap_feature(ids, used, offsets, sample_offset, np.uint64(step & 0xFFFFFFFF), words)
    return used
