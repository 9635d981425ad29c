"""How long a run has said nothing, and how long it has been running, by clocks that nobody sets and no sleep moves.

Wall clocks are set forward and back, machines are suspended, the service itself may be stopped for an hour: none of it
is the fault of a run. So what counts is the time in which this process came round and looked, on the monotonic clock,
which stands still while the machine sleeps. Where the two clocks of the kernel say that it slept, or where no look was
possible for long, every run is given a whole interval more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

SLEPT_SECONDS = 1.0
"""By so much more than the monotonic clock has the boot-time clock moved: the machine was suspended."""


class Looked(NamedTuple):
    """``silent_seconds`` since anything new came; ``running_seconds`` since the attempt was launched."""

    silent_seconds: float
    running_seconds: float


class _Seen:
    attempt: tuple[int, str | None]
    size: int
    since: float
    launched: float


class Watch:
    """One for all runs of a runner. ``interval_seconds``: what a run may be silent for; a gap of half of it between two
    rounds begins the interval anew."""

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
        """Called at the start of each round with the jobs that are looked after. True: everyone's interval began anew,
        because the machine or this process was away."""
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
        """``attempt``: its number and lease. ``size``: of what the run has said so far. ``age_seconds``: by the wall
        clock since the launch, which is asked once, when this attempt is first seen: by a service that was started
        after it."""
        now = self._monotonic()
        seen = self._runs.get(job_id)
        if seen is None or seen.attempt != attempt:
            seen = self._runs[job_id] = _Seen()
            seen.attempt, seen.size, seen.since = attempt, size, now
            seen.launched = now - max(0.0, age_seconds)
        if size != seen.size:
            seen.size, seen.since = size, now
        return Looked(now - seen.since, now - seen.launched)
