"""Philox4x32-10, the counter-based generator behind every draw (Salmon et al., SC 2011), in numpy.

A draw is a pure function of a key and a counter, so it is the same for every backend, world size and sharding plan, and
after a resume. The compiled form is embeddings/kernels/cpu/src/philox.h.
"""

from __future__ import annotations

import zlib

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LANES = 4
# Above this n a 32-bit word times n is visibly uneven (one part in 2^10), so two words are used.
ONE_WORD_LIMIT = 1 << 22
# The second word of a draw is the same lane of this other stream, so it is shared with no other sample or stream.
LOW_WORD_STREAM = 1 << 31

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: tuple[np.ndarray | int, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Return the four 32-bit output words of each counter, as uint64 arrays; words of ``counter`` are broadcast."""
    c0, c1, c2, c3 = np.broadcast_arrays(*[np.asarray(word, dtype=np.uint64) & _MASK for word in counter])
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    m0, m1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
    for _ in range(NUM_ROUNDS):
        product0 = m0 * c0
        product1 = m1 * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = np.uint64((int(k0) + WEYL[0]) & 0xFFFFFFFF)
        k1 = np.uint64((int(k1) + WEYL[1]) & 0xFFFFFFFF)
    return c0, c1, c2, c3


def table_key(seed: int, table: str) -> tuple[int, int]:
    """Return the key of a table's draws: (seed as uint32, crc32 of its name)."""
    return seed & 0xFFFFFFFF, zlib.crc32(table.encode())


def lane(words: tuple[np.ndarray, ...], lanes: np.ndarray) -> np.ndarray:
    """Return word ``lanes[i]`` of draw i."""
    return np.choose(lanes.astype(np.int64), words)


def uniform_below(n: int | np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return uniform integers in [0, n) by multiply-shift.

    One word is enough up to n = 2^22; above, it is the high part of (high:low) * n.

    Args:
        n: the bound, 1 <= n <= 2^32: one number, or an array with a bound for each word.
        high: uint64 array of 32-bit words.
        low: uint64 array of 32-bit words; ignored where one word is enough.
    """
    bound = np.asarray(n).astype(np.uint64)
    carry = np.where(bound <= np.uint64(ONE_WORD_LIMIT), np.uint64(0), (low * bound) >> _SHIFT)
    return (high * bound + carry) >> _SHIFT
