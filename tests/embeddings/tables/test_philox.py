"""Philox against its published vectors, and the mapping of words to integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.kernels.cpu import fill_keep_mask
from embeddings.tables.philox import ONE_WORD_LIMIT, philox4x32, table_key, uniform_below

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


@given(
    positions=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=5), samples=st.tuples(WORD, WORD), step=WORD,
    site=st.integers(0, 2**16 - 1), key=st.tuples(WORD, WORD), threshold=st.sampled_from([0, 1, 2**31, 2**32]),
)  # fmt: skip
def test_compiled_equals_numpy(positions, samples, step, site, key, threshold):
    """In masks of dropout."""
    keep = torch.empty(2, len(positions), 12, dtype=torch.bool)
    fill_keep_mask(keep, torch.tensor([positions] * 2), torch.tensor(samples), threshold, (step, site), key)
    places = (site << 16 | np.array(positions))[None, :, None]
    words = np.stack(philox4x32((step, np.array(samples)[:, None, None], places, np.arange(3)), key), axis=-1)
    assert np.array_equal(keep.numpy(), words.reshape(keep.shape) >= threshold)


@pytest.mark.parametrize("n", [1, 3, 2**22, 2**22 + 1, 2**24 - 3, 3 * 2**30, 2**32 - 1, 2**32])
def test_multiply_shift_is_exact(n):
    """Also where the low word carries into the high one: a quarter of the draws at n = 3 * 2^30."""
    words = np.random.default_rng(n).integers(0, 2**32, (2, 4000), dtype=np.uint64)
    words = np.concatenate([words, np.array([[0, 0, 2**32 - 1], [0, 2**32 - 1, 2**32 - 1]], dtype=np.uint64)], axis=1)
    got = uniform_below(n, words[0], words[1])
    for high, low, drawn in zip(words[0].tolist(), words[1].tolist(), got.tolist(), strict=True):
        assert drawn == ((high * n) >> 32 if n <= ONE_WORD_LIMIT else (((high << 32) | low) * n) >> 64) < n


def test_table_key_is_seed_and_crc32():
    assert table_key(2**32 + 3, "item") == (3, 0x1F1B251E)
