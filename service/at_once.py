"""What is brief is done on the event loop itself: a hundred rows of mapped memory take less time than handing them to a
thread and back, where Python's threads keep each other waiting for milliseconds (docs/adr/0042).

A page that must be read from disk would keep everybody waiting. The kernel counts those: after one, threads do the
work for a while, and wait for the disk instead.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

PAUSE_SECONDS = 1.0
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts for the process alone


class AtOnce:
    """Where brief work may be done now. Of one event loop's thread."""

    def __init__(self, waits: Callable[[], int] | None = None, pause_seconds: float = PAUSE_SECONDS):
        """``waits``: how often this thread has waited for a page from disk, by default what the kernel says."""
        self._waits = waits or major_faults
        self._pause_seconds = pause_seconds
        self._not_before = 0.0

    def allowed(self) -> bool:
        """Whether memory alone was read lately."""
        return time.monotonic() >= self._not_before

    def call(self, work: Callable[[], Result]) -> Result:
        """``work()``, here and now."""
        before = self._waits()
        try:
            return work()
        finally:
            if self._waits() > before:
                self._not_before = time.monotonic() + self._pause_seconds


def major_faults() -> int:
    """Pages that this thread has waited for until they were read from disk."""
    return resource.getrusage(_WHO).ru_majflt
