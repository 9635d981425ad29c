"""Counts of what is before alone: as their sum says, in calls of any size, and never from after the time asked for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings import RecentCounts

HALF_LIFE = 3.0


def literal(ids, times, key, time) -> float:
    """The sum of the docstring."""
    return sum(
        2.0 ** (-(time - at) / HALF_LIFE) for one, at in zip(ids, times, strict=True) if one == key and at < time
    )


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=30), st.integers(0, 30))
def test_counts_are_their_sum_and_rows_see_what_is_before_them_alone(rows, cut):
    """Also where calls follow each other, rows of one time come in two of them, and a call is not in order."""
    ids, times = [one for one, _ in rows], [at for _, at in rows]
    wanted = [literal(ids, times, key, at) for key, at in rows]
    assert RecentCounts(HALF_LIFE).add(ids, times) == pytest.approx(wanted)
    counts, order = RecentCounts(HALF_LIFE), sorted(range(len(rows)), key=lambda row: times[row])
    found = np.empty(len(rows))
    for part in (order[:cut], order[cut:]):
        found[part] = counts.add([ids[row] for row in part], [times[row] for row in part])
    assert found == pytest.approx(wanted)
    last = max(times, default=0)
    for time in (last, last + 2.5):
        asked = counts.at(np.array(["a", "b", "never"]), time)
        assert asked == pytest.approx([literal(ids, times, key, time) for key in ("a", "b", "never")])


@pytest.mark.parametrize("column", [list, np.array, pa.array, lambda ids: pa.chunked_array([ids]), torch.tensor])
def test_ids_are_the_same_in_any_column(column):
    counts = RecentCounts(HALF_LIFE)
    assert counts.add(column([7, 8, 7]), [0, 0, 3]) == pytest.approx([0, 0, 0.5])
    for asked in ([7, 8], pa.array([7, 8]), torch.tensor([7, 8])):
        assert counts.at(asked, 3) == pytest.approx([0.5, 0.5])


def test_what_would_tell_of_the_future_is_refused():
    counts = RecentCounts(HALF_LIFE)
    counts.add([1, 2], [5, 9])
    with pytest.raises(ValueError, match=r"time is 8.*at or after"):
        counts.at([1], 8)
    with pytest.raises(ValueError, match=r"8, and 9 was added before: add .* in the order of time"):
        counts.add([1], [8])
    assert counts.at([1, 2], 11) == pytest.approx([0.25, 2 ** (-2 / 3)])  # a refused call leaves no trace
    with pytest.raises(ValueError, match="2 ids have times of shape"):
        counts.add([1, 2], [10])
    with pytest.raises(ValueError, match="row 1 is not finite"):
        counts.add([1, 2], [10, float("nan")])
    for half_life in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="give a time above 0"):
            RecentCounts(half_life)
