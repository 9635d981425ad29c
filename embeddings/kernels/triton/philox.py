"""Philox4x32-10 in Triton, with the keys and counters of :mod:`embeddings.tables.philox`: the same words, bit for bit.

``tl.philox_impl`` is the published generator (tests compare it with known-answer vectors). ``tl.randint4x`` is
not used: its counter is one offset, the counter here is four words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from embeddings.tables.philox import LOW_WORD_STREAM, ONE_WORD_LIMIT

_LOW_WORD_STREAM = tl.constexpr(LOW_WORD_STREAM)
_ONE_WORD_LIMIT = tl.constexpr(ONE_WORD_LIMIT)


@triton.jit
def four_words(c0, c1, c2, c3, key0, key1):
    """Return the uint32 output words of each counter.

    ``c1`` is a uint32 tensor, each other argument a uint32 tensor or a scalar.
    """
    zero = c1 * 0
    return tl.philox_impl(zero + c0, c1, zero + c2, zero + c3, zero + key0, zero + key1)


@triton.jit
def one_word(c0, c1, c2, stream, key0, key1, lane):
    """Return word ``lane`` (0 to 3) of each counter, uint32."""
    w0, w1, w2, w3 = four_words(c0, c1, c2, stream, key0, key1)
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def below(n, c0, c1, c2, stream, key0, key1, lane):
    """Return uniform integers in [0, n), int64: embeddings.tables.philox.uniform_below of the words of ``stream``.

    ``n`` is an int64 tensor of numbers from 1 to 2^32. Up to 2^22 one word is enough. Above, the word of stream + 2^31
    is appended as the low half, and the result is the high part of the product with n.
    """
    bound = n.to(tl.uint64)
    product = one_word(c0, c1, c2, stream, key0, key1, lane).to(tl.uint64) * bound
    if tl.max(n) > _ONE_WORD_LIMIT:
        low = one_word(c0, c1, c2, stream + _LOW_WORD_STREAM, key0, key1, lane).to(tl.uint64)
        product += tl.where(n > _ONE_WORD_LIMIT, (low * bound) >> 32, 0)
    return (product >> 32).to(tl.int64)
