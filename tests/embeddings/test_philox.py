"""Philox against its published vectors, and the mapping of words to integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from embeddings.kernels.cpu import philox
from embeddings.philox import LOW_WORD_STREAM, ONE_WORD_LIMIT, philox4x32, table_key, uniform_below
from embeddings.sse import ROW_STREAM

# Random123 1.14, examples/kat_vectors, "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert tuple(int(word) for word in philox4x32(counter, key)) == expected


def test_counters_are_broadcast():
    words = philox4x32((np.arange(3)[:, None], 7, np.arange(2)[None, :], 1), (5, 6))
    assert words[0].shape == (3, 2)
    alone = philox4x32((2, 7, 1, 1), (5, 6))
    assert [int(word[2, 1]) for word in words] == [int(word) for word in alone]


@njit
def grouped(c0, c1, c2, c3, k0, k1, threshold):
    return philox.philox_hits(c0, c1, c2, c3, k0, k1, threshold)


@njit
def lowest(bits):
    return philox.lowest_bit(bits)


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD), lane=st.integers(0, philox.LANES - 1))
def test_hits_of_groups_of_counters_equal_numpy(counter, key, lane):
    """Also where the second word of a counter runs over, and at a threshold that is one of the words."""
    second = (counter[1] + np.arange(philox.GROUPS)) % 2**32
    words = np.stack(philox4x32((counter[0], second, *counter[2:]), key), axis=1).reshape(-1)
    for threshold in {1, 2**31, 2**32, max(1, int(words[lane])), int(words[lane]) + 1}:
        bits = int(grouped(*[np.uint64(word) for word in (*counter, *key, threshold)]))
        assert [bits >> i & 1 for i in range(philox.LANES)] == (words < threshold).astype(int).tolist()


@given(bits=st.integers(1, 2**32 - 1))
def test_lowest_bit(bits):
    assert lowest(np.uint32(bits)) == (bits & -bits).bit_length() - 1


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD))
def test_compiled_equals_numpy(counter, key):
    compiled = philox.philox4x32(*[np.uint64(word) for word in (*counter, *key)])
    assert [int(word) for word in compiled] == [int(word) for word in philox4x32(counter, key)]


@pytest.mark.parametrize("n", [1, 3, 2**22, 2**22 + 1, 2**24 - 3, 3 * 2**30, 2**32 - 1, 2**32])
def test_multiply_shift_is_exact(n):
    """Also where the low word carries into the high one: a quarter of the draws at n = 3 * 2^30."""
    words = np.random.default_rng(n).integers(0, 2**32, (2, 4000), dtype=np.uint64)
    words = np.concatenate([words, np.array([[0, 0, 2**32 - 1], [0, 2**32 - 1, 2**32 - 1]], dtype=np.uint64)], axis=1)
    got = uniform_below(n, words[0], words[1])
    for high, low, drawn in zip(words[0].tolist(), words[1].tolist(), got.tolist(), strict=True):
        assert drawn == ((high * n) >> 32 if n <= ONE_WORD_LIMIT else (((high << 32) | low) * n) >> 64) < n


@given(n=st.integers(1, 2**32), words=st.tuples(WORD, WORD, WORD), lane=st.integers(0, 3))
def test_compiled_draws_equal_numpy(n, words, lane):
    """The draw of a new row, one word and two."""
    step, group, place = words
    counter = [(step, group, place, stream) for stream in (ROW_STREAM, ROW_STREAM + LOW_WORD_STREAM)]
    high, low = (philox4x32(each, (7, 9))[lane] for each in counter)
    stream, key = np.uint64(ROW_STREAM), (np.uint64(7), np.uint64(9))
    compiled = philox.draw_below(*[np.uint64(word) for word in words], stream, lane, *key, np.uint64(n))
    assert compiled == int(uniform_below(n, high, low))


def test_table_key_is_seed_and_crc32():
    assert table_key(2**32 + 3, "item") == (3, 0x1F1B251E)
