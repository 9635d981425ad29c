"""The transition function over its whole table, and the walks that it allows."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from service.jobs.states import ACTIVE, STATES, TERMINAL, Refused, Trigger, backoff_seconds, transition

NO = Refused(ignored=False)
LATE = Refused(ignored=True)
HAPPENINGS = get_args(Trigger)

# Rows: state. Columns: claimed, running, publishing, succeeded, failed, cancelled, interrupted, lost, cancel, retry.
TABLE = {
    "queued": ["starting", LATE, LATE, LATE, LATE, LATE, LATE, LATE, "cancelled", NO],
    "starting": [NO, "running", "publishing", "succeeded", "failed", "cancelled", "queued", "failed", "cancelling", NO],
    "running": [NO, LATE, "publishing", "succeeded", "failed", "cancelled", "queued", "failed", "cancelling", NO],
    "publishing": [NO, LATE, LATE, "succeeded", "failed", "cancelled", "queued", "failed", "cancelling", NO],
    "cancelling": [NO, LATE, LATE, "succeeded", "cancelled", "cancelled", "cancelled", "cancelled", LATE, NO],
    "succeeded": [NO, LATE, LATE, LATE, LATE, LATE, LATE, LATE, NO, NO],
    "failed": [NO, LATE, LATE, LATE, LATE, LATE, LATE, LATE, NO, "queued"],
    "cancelled": [NO, LATE, LATE, LATE, LATE, LATE, LATE, LATE, LATE, "queued"],
}


def test_the_whole_table() -> None:
    assert tuple(TABLE) == STATES
    for state, row in TABLE.items():
        assert len(row) == len(HAPPENINGS)
        for happening, expected in zip(HAPPENINGS, row, strict=True):
            assert transition(state, happening) == expected, (state, happening)


@given(st.lists(st.sampled_from(HAPPENINGS), max_size=30))
def test_walks(happenings: list[Trigger]) -> None:
    """An ended job starts again by a retry alone, and a cancelled one never runs on."""
    state, cancelled = "queued", False
    for happening in happenings:
        after = transition(state, happening)
        if isinstance(after, Refused):
            continue
        assert after in STATES
        if state in TERMINAL:
            assert (happening, after) == ("retry", "queued")
            cancelled = False
        if cancelled:
            assert after in ("cancelled", "succeeded")
        cancelled = cancelled or (happening == "cancel" and state in ACTIVE)
        state = after


def test_backoff_doubles_up_to_a_limit() -> None:
    waits = [backoff_seconds(failures, 10) for failures in range(1, 12)]
    assert waits[:4] == [10, 20, 40, 80]
    assert waits == sorted(waits)
    assert waits[-1] == 640
