"""Storing rows: half types by the stochastic rounding of :mod:`embeddings.optim.stochastic_rounding`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from embeddings.kernels.triton.philox import four_words
from embeddings.optim.stochastic_rounding import STREAM

_STREAM = tl.constexpr(STREAM)


@triton.jit
def store(
    at, theta, writing, row, table_words, mask, step,
    STORED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Store ``theta`` [TILE, BLOCK] of the local rows ``row`` [TILE] as STORED.

    ``table_words`` is where the descriptions of the rows' tables are: see embeddings.kernels.triton.rules.
    """
    if (STORED == tl.bfloat16) or (STORED == tl.float16):  # noqa: SIM300
        key0 = tl.load(table_words + 6, mask=mask, other=0).to(tl.uint32)
        key1 = tl.load(table_words + 7, mask=mask, other=0).to(tl.uint32)
        row = row + tl.load(table_words + 4, mask=mask, other=0)
        column_start = tl.load(table_words + 5, mask=mask, other=0)
        word = draws(row, column_start, step.to(tl.uint32), key0, key1, TILE, BLOCK, QUADS)
        if STORED == tl.bfloat16:  # noqa: SIM300
            bits = theta.to(tl.uint32, bitcast=True) + (word & 0xFFFF)
            rounded = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            rounded = _to_half(theta, word)
        tl.store(at, rounded, mask=writing)
    else:
        tl.store(at, theta, mask=writing)


@triton.jit
def draws(row, column_start, step, key0, key1, TILE: tl.constexpr, BLOCK: tl.constexpr, QUADS: tl.constexpr):
    """Return a uint32 word for each element, [TILE, BLOCK].

    The word is lane ``column & 3`` of Philox at counter (step, row, row >> 32 << 16 | column >> 2, stream). Row and
    column count in the whole table, not in the shard.
    QUADS: every column_start is a multiple of 4, so that one draw serves four elements of one thread.
    """
    low, high = row.to(tl.uint32)[:, None], ((row >> 32) << 16).to(tl.uint32)[:, None]
    if QUADS and BLOCK >= 4:
        zero = tl.zeros([TILE, BLOCK // 4], dtype=tl.uint32)
        quad = zero + tl.arange(0, BLOCK // 4).to(tl.uint32)[None, :] + (column_start >> 2).to(tl.uint32)[:, None]
        w0, w1, w2, w3 = four_words(step, zero + low, high | quad, _STREAM, key0[:, None], key1[:, None])
        # The last axis of a join is the faster one: columns come out as w0 w1 w2 w3.
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE, BLOCK])
    else:
        zero = tl.zeros([TILE, BLOCK], dtype=tl.uint32)
        column = zero + tl.arange(0, BLOCK).to(tl.uint32)[None, :] + column_start.to(tl.uint32)[:, None]
        w0, w1, w2, w3 = four_words(step, zero + low, high | (column >> 2), _STREAM, key0[:, None], key1[:, None])
        lane = column & 3
        words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return words


@triton.jit
def _to_half(x, word):
    """Round as embeddings.optim.stochastic_rounding.to_float16."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF).to(tl.int32)
    finite = exponent < 255
    size = tl.where(finite, tl.abs(x), 0.0)
    # The spacing of float16 values at x: 2^(e - 10), or 2^-24 for subnormal ones. Dividing by it is exact.
    unit = ((tl.maximum(tl.where(finite, exponent, 0), 113) - 10) << 23).to(tl.float32, bitcast=True)
    below = tl.floor(size / unit)
    up = ((size / unit - below) * 4294967296.0).to(tl.int64) > word.to(tl.int64)
    rounded = ((below + up.to(tl.float32)) * unit).to(tl.uint32, bitcast=True) | (bits & 0x80000000)
    return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True).to(tl.float16)
