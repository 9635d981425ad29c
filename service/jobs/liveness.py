"""Silence and running time of runs, independent of clock changes and machine sleep.

Wall clocks are set forward and back, machines are suspended, and the service itself may be stopped for an hour; a run
must not be ended for that. So only time in which this process was able to check is counted, by the monotonic clock,
which stops while the machine sleeps. If the kernel's two clocks show that the machine slept, or if no check was
possible for long, every run gets another full interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

SLEPT_SECONDS = 1.0
"""Smallest lead, gained by the boot-time clock on the monotonic clock in a round, that means that the machine slept."""


class Looked(NamedTuple):
    """Result of a check: ``silent_seconds`` since the last report, ``running_seconds`` since the attempt's launch."""

    silent_seconds: float
    running_seconds: float


class _Seen:
    attempt: tuple[int, str | None]
    size: int
    since: float
    launched: float


class Liveness:
    """Measures silence and running time of all runs of a runner.

    ``interval_seconds``: longest silence of a run. A gap of more than half of it between two rounds restarts the
    interval of every run.
    """

    def __init__(
        self,
        interval_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
        boottime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ):
        self._interval = interval_seconds
        self._monotonic, self._boottime = monotonic, boottime
        self._runs: dict[str, _Seen] = {}
        self._last = monotonic()
        self._slept = boottime() - self._last

    def begin_round(self, job_ids: set[str]) -> bool:
        """Start a round of checks on these jobs.

        Returns:
            True if every job's interval was restarted because the machine or this process was suspended.
        """
        now = self._monotonic()
        slept = self._boottime() - now
        away = slept - self._slept > SLEPT_SECONDS or now - self._last > self._interval / 2
        self._last, self._slept = now, slept
        for job_id in self._runs.keys() - job_ids:
            del self._runs[job_id]
        if away:
            for seen in self._runs.values():
                seen.since = now
        return away

    def look(self, job_id: str, attempt: tuple[int, str | None], size: int, age_seconds: float) -> Looked:
        """Return the time for which the run has been silent and running.

        ``attempt``: its number and lease. ``size``: bytes that the run has reported so far. ``age_seconds``: wall-clock
        time since the launch. The age is used only when this attempt is first seen, since the service may have started
        after the attempt.
        """
        now = self._monotonic()
        seen = self._runs.get(job_id)
        if seen is None or seen.attempt != attempt:
            seen = self._runs[job_id] = _Seen()
            seen.attempt, seen.size, seen.since = attempt, size, now
            seen.launched = now - max(0.0, age_seconds)
        if size != seen.size:
            seen.size, seen.since = size, now
        return Looked(now - seen.since, now - seen.launched)
