"""Storing rows: half types with stochastic rounding, whose draws are those of every backend and sharding plan."""

from __future__ import annotations

import triton
import triton.language as tl

from embeddings.kernels.triton.philox import four_words

# Stream of these draws: see embeddings.rounding.
STREAM = tl.constexpr(0x40000000)


@triton.jit
def draws(row, column_start, step, key0, key1, TILE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """A uint32 word for each element, [TILE, BLOCK].

    Counter (step, row, row >> 32 << 16 | column >> 2, STREAM), lane column & 3; rows and columns of the whole table,
    int64 [TILE]. ALIGNED: column_start is a multiple of 4, so that one draw serves four elements of a thread.
    """
    high = ((row >> 32) << 16).to(tl.uint32)[:, None]
    low = row.to(tl.uint32)[:, None]
    if ALIGNED:
        zero = tl.zeros([TILE, BLOCK // 4], dtype=tl.uint32)
        quad = zero + tl.arange(0, BLOCK // 4).to(tl.uint32)[None, :] + (column_start >> 2).to(tl.uint32)[:, None]
        w0, w1, w2, w3 = four_words(step, zero + low, high | quad, STREAM, zero + key0[:, None], zero + key1[:, None])
        # The last axis of a join is the faster one: columns come out as w0 w1 w2 w3.
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([TILE, BLOCK])
    else:
        zero = tl.zeros([TILE, BLOCK], dtype=tl.uint32)
        column = zero + tl.arange(0, BLOCK).to(tl.uint32)[None, :] + column_start.to(tl.uint32)[:, None]
        w0, w1, w2, w3 = four_words(
            step, zero + low, high | (column >> 2), STREAM, zero + key0[:, None], zero + key1[:, None]
        )
        lane = column & 3
        words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return words
