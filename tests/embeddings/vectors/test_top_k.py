"""The highest scores, piece by piece: the same as of all columns at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.vectors.top_k import BestSoFar, top_k


@given(st.data())
def test_pieces_give_what_all_columns_give(data: st.DataObject) -> None:
    rows, columns, k = (data.draw(st.integers(1, most)) for most in (4, 60, 12))
    # Whole numbers, so that many are equal; some are no answers.
    values = st.one_of(st.integers(-5, 5).map(float), st.just(-np.inf))
    flat = data.draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    scores = np.array(flat, dtype=np.float32).reshape(rows, columns)
    best, start = BestSoFar(rows, k), 0
    while start < columns:
        size = data.draw(st.integers(1, columns - start))
        best.add(start, scores[:, start : start + size])
        start += size
    expected = np.take_along_axis(scores, top_k(scores, k), 1)
    np.testing.assert_array_equal(best.scores, expected)
    finite = np.isfinite(best.scores)
    np.testing.assert_array_equal(np.take_along_axis(scores, best.columns, 1)[finite], expected[finite])
    for row, is_finite in zip(best.columns, finite, strict=True):
        assert len(set(row[is_finite])) == is_finite.sum()


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_many_columns_in_any_order(order: str) -> None:
    scores = np.sort(np.random.default_rng(0).standard_normal((3, 5000)).astype(np.float32), axis=1)
    if order == "descending":
        scores = scores[:, ::-1]
    elif order == "random":
        scores = np.random.default_rng(1).permuted(scores, axis=1)
    best = BestSoFar(3, 20)
    for start in range(0, 5000, 64):
        best.add(start, scores[:, start : start + 64])
    np.testing.assert_array_equal(best.columns, np.argsort(-scores, axis=1)[:, :20])
