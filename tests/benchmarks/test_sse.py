"""The two contestants of bench ``row_wise`` take the same steps on two ranks, and differ by the swaps alone."""

from __future__ import annotations

import pytest

from benchmarks.sse import time_row_wise
from benchmarks.support.harness import MIN_ITERATIONS, Workload

pytestmark = pytest.mark.xdist_group("ranks")

SMALL = Workload("uniform", 2, 500, 8, 4001)


def test_a_step_of_both_is_timed_on_both_ranks(ranks):
    """``time_row_wise`` itself refuses a number of swaps that SSE would not give."""
    found = ranks(2).run(time_row_wise, SMALL, MIN_ITERATIONS)
    assert [times.shape for times, _ in found] == [(MIN_ITERATIONS, 2)] * 2
    assert all((times > 0).all() for times, _ in found)
    assert len({num_swaps for _, num_swaps in found}) == 1


def test_contestants_without_a_difference_are_refused(ranks):
    """A table of one live row has no other row to swap to, so there would be nothing to measure."""
    with pytest.raises(AssertionError, match=r"AssertionError: \(0, 80\.02\)"):
        ranks(2).run(time_row_wise, Workload("uniform", 2, 3, 8, 4001), MIN_ITERATIONS)
