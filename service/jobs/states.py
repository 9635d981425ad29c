"""The states of a job and the one pure function that moves between them; it uses neither clock nor database."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

State = Literal["queued", "starting", "running", "publishing", "cancelling", "succeeded", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
ACTIVE = ("starting", "running", "publishing", "cancelling")
TERMINAL = ("succeeded", "failed", "cancelled")

Trigger = Literal[
    "claimed",  # a runner takes it from the queue
    "running", "publishing", "succeeded", "failed", "cancelled",  # the run reports
    "interrupted",  # an infrastructure failure with a retry left
    "lost",  # an infrastructure failure with none left
    "cancel", "retry",  # the user asks
]  # fmt: skip

_FORWARD = {"starting": 0, "running": 1, "publishing": 2}


class Refused(NamedTuple):
    """Result for a trigger that does not fit the state. ``ignored``: True for a late or repeated report."""

    ignored: bool


def transition(state: str, trigger: Trigger) -> str | Refused:
    """Return the state after ``trigger``.

    A run's own report never moves its job back to an earlier state. An accepted cancellation ends as ``cancelled``,
    unless the run had already succeeded when the cancellation arrived; its publication then stays, and the job shows
    it.
    """
    if trigger == "cancel":
        if state == "queued":
            return "cancelled"
        if state in _FORWARD:
            return "cancelling"
        return Refused(ignored=state in ("cancelling", "cancelled"))
    if trigger == "retry":
        return "queued" if state in ("failed", "cancelled") else Refused(ignored=False)
    if trigger == "claimed":
        return "starting" if state == "queued" else Refused(ignored=False)
    if state == "cancelling":
        if trigger in ("running", "publishing"):
            return Refused(ignored=True)
        return "succeeded" if trigger == "succeeded" else "cancelled"
    if state in _FORWARD:
        if trigger in ("running", "publishing"):
            return trigger if _FORWARD[trigger] > _FORWARD[state] else Refused(ignored=True)
        if trigger == "interrupted":
            return "queued"
        return "failed" if trigger == "lost" else trigger
    return Refused(ignored=True)


def backoff_seconds(failures: int, base_seconds: float) -> float:
    """Return the seconds to wait after the ``failures``-th failure: base, 2 base, 4 base, ... at most 64 base."""
    return base_seconds * 2 ** min(failures - 1, 6)
