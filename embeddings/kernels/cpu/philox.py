"""Compiled form of :mod:`embeddings.philox`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

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


GROUPS = 8
LANES = 4 * GROUPS


@intrinsic
def philox_hits(typingctx, c0, c1, c2, c3, k0, k1, threshold):  # type: ignore[no-untyped-def]
    """Bit 4 i + lane of the result: whether word ``lane`` of counter (c0, c1 + i, c2, c3) is below ``threshold``.

    i runs over GROUPS, ``threshold`` lies in [1, 2^32]. One multiplication of eight lanes in place of eight, and one
    comparison for all words: LLVM does not find that out by itself.
    """
    return types.uint32(*[types.uint64] * 7), _emit_hits


@intrinsic
def lowest_bit(typingctx, bits):  # type: ignore[no-untyped-def]
    """The number of the lowest bit that is set in ``bits``, uint32 and not 0."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.zext(builder.cttz(arguments[0], ir.IntType(1)(1)), ir.IntType(64))

    return types.int64(types.uint32), emit


def _emit_hits(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
    word, lanes = ir.IntType(64), ir.VectorType(ir.IntType(64), GROUPS)

    def constant(value: int) -> ir.Value:
        return ir.Constant(lanes, [value] * GROUPS)

    def spread(scalar: ir.Value) -> ir.Value:
        one = builder.insert_element(ir.Constant(lanes, ir.Undefined), scalar, ir.IntType(32)(0))
        return builder.shuffle_vector(
            one, ir.Constant(lanes, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), GROUPS), [0] * GROUPS)
        )

    mask, shift = constant(0xFFFFFFFF), constant(32)
    keys = list(arguments[4:6])
    counter = [spread(each) for each in arguments[:4]]
    counter[1] = builder.add(counter[1], ir.Constant(lanes, list(range(GROUPS))))
    # Known upper halves of 0 make each product one instruction.
    counter = [builder.and_(each, mask) for each in counter]
    for _ in range(NUM_ROUNDS):
        p0, p1 = (
            builder.mul(each, constant(multiplier))
            for each, multiplier in zip((counter[0], counter[2]), MULTIPLIERS, strict=True)
        )
        k0, k1 = (builder.and_(spread(key), mask) for key in keys)
        counter = [
            builder.xor(builder.xor(builder.lshr(p1, shift), counter[1]), k0), builder.and_(p1, mask),
            builder.xor(builder.xor(builder.lshr(p0, shift), counter[3]), k1), builder.and_(p0, mask),
        ]  # fmt: skip
        keys = [builder.add(key, word(weyl)) for key, weyl in zip(keys, WEYL, strict=True)]
    narrow = ir.VectorType(ir.IntType(32), GROUPS)
    w0, w1, w2, w3 = (builder.trunc(each, narrow) for each in counter)

    def shuffle(a: ir.Value, b: ir.Value, order: list[int]) -> ir.Value:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))

    together = list(range(2 * GROUPS))
    order = [lane * GROUPS + group for group in range(GROUPS) for lane in range(4)]
    words = shuffle(shuffle(w0, w1, together), shuffle(w2, w3, together), order)
    # Not above threshold - 1: 2^32 itself has more than 32 bits.
    highest = builder.trunc(spread(builder.sub(arguments[6], word(1))), narrow)
    hits = builder.icmp_unsigned("<=", words, shuffle(highest, highest, [0] * LANES))
    return builder.bitcast(hits, ir.IntType(32))
