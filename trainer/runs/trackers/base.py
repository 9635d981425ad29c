"""What a tracker is: it takes points of curves, and knows which it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Point(NamedTuple):
    """One value of a curve. ``step`` is that of the run for ``train/`` and the epoch for the others."""

    name: str
    value: float
    step: int
    time: float
    """Seconds since 1970."""


class Tracker(Protocol):
    """Where the curves of one run go. Every method may block, and raises whatever went wrong."""

    def last_steps(self) -> dict[str, int]:
        """Return the last step of each curve that the tracker has, of this attempt and of those before."""

    def log(self, points: Sequence[Point]) -> None:
        """Take points, in the order of their steps."""

    def end(self, state: str | None, tags: Mapping[str, str]) -> None:
        """Take the state in which the attempt ended, None where it was killed, and what came of its publication."""

    def close(self) -> None:
        """Let go of files and connections."""


class TrackerUnusableError(RuntimeError):
    """What no second try mends, such as a package that is not installed; the message has the remedy."""
