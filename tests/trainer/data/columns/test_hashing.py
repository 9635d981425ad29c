"""Hashes: published known answers, stability, independence of Arrow's buffers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns.hashing import below, derive_key, id_keys, mix, random_words, unit_interval, unmix

INT64S = st.integers(-(2**63), 2**63 - 1)


def test_splitmix64_known_answers():
    """The first outputs of splitmix64 from seed 1234567, as published with its reference code."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_words(1234567, np.arange(4)).tolist() == expected


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_unmix_undoes_mix(words):
    given_words = np.array(words, np.uint64)
    assert unmix(mix(given_words)).tolist() == words == mix(unmix(given_words)).tolist()


@given(st.lists(INT64S, max_size=20))
def test_integer_keys_follow_the_id_alone(ids):
    keys = id_keys(pa.array(ids, pa.int64()))
    assert [int(id_keys(pa.array([one], pa.int64()))[0]) for one in ids] == keys.tolist()
    assert len(set(keys.tolist())) == len(set(ids))


@given(st.lists(st.text(max_size=12), max_size=20), st.integers(0, 5))
def test_string_keys_follow_the_id_alone(ids, start):
    array = pa.array(ids, pa.large_string())
    keys = id_keys(array)
    assert [int(id_keys(pa.array([one], pa.large_string()))[0]) for one in ids] == keys.tolist()
    assert len(set(keys.tolist())) == len(set(ids))
    assert id_keys(array.slice(start)).tolist() == keys[start:].tolist()


def test_string_key_by_hand():
    """The formula of the docstring in Python integers."""
    multiplier, mask = 0xD1342543DE82EF95, 2**64 - 1
    text = "café"
    total = sum((byte + 1) * pow(multiplier, position + 1, 2**64) for position, byte in enumerate(text.encode())) & mask

    def mix(word):
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & mask
        return word ^ word >> 31

    state = 0
    for key in (total, len(text.encode())):
        state = mix(((state ^ key) + 0x9E3779B97F4A7C15) & mask)
    assert int(id_keys(pa.array([text], pa.large_string()))[0]) == state


def test_an_integer_and_its_digits_are_different_ids():
    assert id_keys(pa.array([17], pa.int64()))[0] != id_keys(pa.array(["17"], pa.large_string()))[0]


def test_derived_keys_depend_on_order_and_count():
    keys = {derive_key(1, 2), derive_key(2, 1), derive_key(1), derive_key(1, 2, 0), derive_key()}
    assert len(keys) == 5


@pytest.mark.parametrize("bound", [1, 2, 10, 1000, 2**31])
def test_below_is_in_range_and_even(bound):
    draws = below(random_words(5, np.arange(20_000)), bound)
    assert draws.min() >= 0
    assert draws.max() < bound
    # The mean of a uniform draw, to 5 standard errors.
    assert abs(draws.mean() - (bound - 1) / 2) <= 5 * bound / np.sqrt(12 * 20_000)


def test_unit_interval():
    values = unit_interval(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert values[0] == 0.0
    assert 1.0 - 2.0**-52 < values[1] < 1.0
