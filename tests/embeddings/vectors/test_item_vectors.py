"""Ids as keys, and item vectors in the order of their ids."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.vectors.item_vectors import (
    ItemIdError,
    ItemVectors,
    arrow_of,
    find_rows,
    keys_of,
    shared_rows,
    unit_rows,
)

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@given(st.sets(texts, max_size=30), st.lists(texts, max_size=30))
def test_strings_are_found_as_a_dictionary_finds_them(stored: set[str], asked: list[str]) -> None:
    keys = np.sort(keys_of(sorted(stored))) if stored else keys_of(pa.array([], pa.string()))
    order = arrow_of(keys).to_pylist()
    assert order == sorted(stored, key=lambda text: text.encode())
    where = {text: row for row, text in enumerate(order)}
    rows = find_rows(keys, keys_of(pa.array(asked, pa.string()), query=True))
    assert rows.tolist() == [where.get(text, -1) for text in asked]


@given(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=30), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_integers_are_found_as_a_dictionary_finds_them(stored: set[int], asked: list[int]) -> None:
    keys = np.sort(keys_of(list(stored)))
    where = {value: row for row, value in enumerate(sorted(stored))}
    probes = asked + sorted(stored)
    assert find_rows(keys, keys_of(probes)).tolist() == [where.get(value, -1) for value in probes]


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "a"],
        np.array(["b", "a"]),
        np.array(["b", "a"], dtype=object),
        pa.array(["b", "a"]),
        pa.array(["b", "a"], pa.large_string()),
        pa.chunked_array([["b"], ["a"]]),
        pa.array(["b", "a"]).dictionary_encode(),
        pa.array(["x", "b", "a"]).slice(1),
    ],
    ids=["list", "numpy", "object", "string", "large_string", "chunked", "dictionary", "slice"],
)
def test_every_form_of_string_ids(ids: object) -> None:
    assert arrow_of(keys_of(ids)).to_pylist() == ["b", "a"]


@pytest.mark.parametrize(
    "ids", [[2, 1], (2, 1), np.array([2, 1], np.int16), np.array([2, 1], np.uint64), pa.array([2, 1], pa.int32())]
)
def test_every_form_of_integer_ids(ids: object) -> None:
    keys = keys_of(ids)
    assert keys.dtype == np.int64
    assert keys.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, "a"], "all integers or all strings"),
        ([1.5], "all integers or all strings"),
        ([True], "all integers or all strings"),
        ([2**63], "beyond int64"),
        (np.array([2**63], np.uint64), "beyond int64"),
        (np.array([0.5]), "integers or strings"),
        (pa.array([None, "a"]), "null"),
        (["a\0b"], "NUL"),
        (["a" * 513], "longer than 512"),
        (["\ud800"], "not valid Unicode"),
    ],
)
def test_ids_that_cannot_be(ids: object, message: str) -> None:
    with pytest.raises(ItemIdError, match=message):
        keys_of(ids)


def test_impossible_queries_find_nothing() -> None:
    keys = np.sort(keys_of(["a", "b"]))
    assert find_rows(keys, keys_of(["a\0", "b", "x" * 600], query=True)).tolist() == [-1, 1, -1]


def test_a_long_query_takes_no_memory_for_each_key() -> None:
    keys = np.arange(100_000).astype("S8")
    keys.sort()
    tracemalloc.start()
    assert find_rows(keys, keys_of(["7", "x" * 512], query=True)).tolist() == [int(np.searchsorted(keys, b"7")), -1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < keys.nbytes


def test_ids_of_the_other_type_are_an_error_not_a_miss() -> None:
    with pytest.raises(ItemIdError, match="the ids here are integers, those asked for are strings"):
        find_rows(keys_of([1]), keys_of(["1"]))


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_shared_rows(left: set[int], right: set[int]) -> None:
    first, second = sorted(left), sorted(right)
    rows, others = shared_rows(np.array(first, np.int64), np.array(second, np.int64))
    assert [first[row] for row in rows] == [second[row] for row in others] == sorted(left & right)


def test_items_are_sorted_with_all_their_columns() -> None:
    items = ItemVectors(
        ["c", "a", "b"], [[3, 0], [1, 0], [0, 2]], evidence=[True, False, True], counts=[30, 10, 20], statuses=[2, 1, 1]
    )
    assert items.arrow_ids().to_pylist() == ["a", "b", "c"]
    assert items.vectors.tolist() == [[1, 0], [0, 2], [3, 0]]
    assert items.norms is not None
    assert items.norms.tolist() == [1, 2, 3]
    assert (items.evidence.tolist(), items.counts.tolist(), items.statuses.tolist()) == (
        [False, True, True], [10, 20, 30], [1, 1, 2],
    )  # fmt: skip


def test_items_that_cannot_be() -> None:
    with pytest.raises(ItemIdError, match="id 'a' occurs more than once"):
        ItemVectors(["a", "b", "a"], np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"expected \[2, d\]"):
        ItemVectors([1, 2], np.ones((3, 2)))
    with pytest.raises(ValueError, match="counts have shape"):
        ItemVectors([1, 2], np.ones((2, 2)), counts=[1])


@given(
    st.integers(1, 6),
    st.lists(st.sampled_from([0.0, 1e-308, 5e-324, 1e-30, 1.0, 3.0, 1e30, 1e300, 1.7e308]), min_size=6, max_size=6),
)
def test_directions_survive_any_scale(dim: int, values: list[float]) -> None:
    row = np.array([values[:dim]])
    directions, norms = unit_rows(row)
    if not row.any():
        assert not directions.any()
        assert norms[0] == 0
        return
    assert np.linalg.norm(directions) == pytest.approx(1.0, abs=1e-12)
    largest = np.argmax(row)
    np.testing.assert_allclose(
        directions[0] / directions[0, largest], row[0] / row[0, largest], rtol=1e-12, atol=1e-300
    )


def test_rows_that_are_not_finite_become_nan() -> None:
    directions, norms = unit_rows(np.array([[1.0, np.inf], [np.nan, 0.0], [3.0, 4.0]]))
    assert np.isnan(directions[:2]).all()
    assert np.isnan(norms[:2]).all()
    assert norms[2] == 5.0
