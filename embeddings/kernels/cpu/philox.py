"""Compiled form of :mod:`embeddings.philox`."""

from __future__ import annotations

import numpy as np

from embeddings.kernels.cpu.compiled import compiled
from embeddings.philox import LOW_WORD_STREAM, MULTIPLIERS, NUM_ROUNDS, ONE_WORD_LIMIT, WEYL

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_LOW_WORD, _ONE_WORD = np.uint64(LOW_WORD_STREAM), np.uint64(ONE_WORD_LIMIT)


@compiled()
def philox4x32(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    for _ in range(NUM_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@compiled()
def lane_of(words, lane):  # type: ignore[no-untyped-def]
    if lane == 0:
        return words[0]
    if lane == 1:
        return words[1]
    if lane == 2:
        return words[2]
    return words[3]


@compiled()
def draw_below(step, group, place, stream, lane, key0, key1, bound):  # type: ignore[no-untyped-def]
    """Uniform in [0, bound): see embeddings.philox.uniform_below."""
    high = lane_of(philox4x32(step, group, place, stream, key0, key1), lane)
    if bound <= _ONE_WORD:
        return np.int64((high * bound) >> _SHIFT)
    low = lane_of(philox4x32(step, group, place, stream + _LOW_WORD, key0, key1), lane)
    return np.int64((high * bound + ((low * bound) >> _SHIFT)) >> _SHIFT)
