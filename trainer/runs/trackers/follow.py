"""``python -m trainer.runs.trackers.follow RUN_DIR``: follows the events of a run and sends its curves to trackers.

The process ends when it reads a line from its parent, or when the parent has died. Each tracker has its own thread,
which reads the events file. So points that a tracker could not receive are sent when it can be reached again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.runs.directory import Run, read_run
from trainer.runs.events import TERMINAL_STATES, read_events
from trainer.runs.protocol import leave
from trainer.runs.trackers.base import LAST_WORDS_SECONDS, Tracker, TrackerUnusableError, points_of, tags_of
from trainer.runs.trackers.mlflow import MLflowTracker
from trainer.runs.trackers.tensorboard import TensorBoardTracker
from trainer.runs.trackers.wandb import WandbTracker

TRACKERS: dict[str, Callable[[Run, Any], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}
"""Constructors by kind of tracker; each takes the run and its entry of ``tracking`` (trainer.spec.tracking)."""
LOCK_FILE = "trackers.lock"
POLL_SECONDS = 1.0
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
POINTS_AT_ONCE = 500


class Follower:
    """Sender of a run's points to one tracker; points that the tracker already has are left out.

    ``spec`` is the tracker's entry in the job's ``tracking``. After the end of the run, failed requests are repeated
    for ``last_words_seconds``.
    """

    def __init__(self, run: Run, spec: Any, last_words_seconds: float = LAST_WORDS_SECONDS):
        self.run, self.spec, self.last_words_seconds = run, spec, last_words_seconds
        self._tracker: Tracker | None = None
        self._state: str | None = None
        self._tags: dict[str, str] = {}

    def follow(self, ended: threading.Event) -> None:
        """Send points until the run has ended and all points are sent, or the tracker is given up."""
        wait, is_told, deadline = FIRST_WAIT_SECONDS, False, float("inf")
        while True:
            is_last = ended.is_set()
            if is_last:
                deadline = min(deadline, time.monotonic() + self.last_words_seconds)
            try:
                self._hand_on()
                if is_last:
                    self._end()
                    return
                wait, is_told = FIRST_WAIT_SECONDS, False
                ended.wait(POLL_SECONDS)
            except TrackerUnusableError as error:
                self._say(f"no {self.spec.kind}: {error}")
                return
            except Exception as error:  # no error of a tracker may end the run
                if not is_told:
                    self._say(f"{self.spec.kind} cannot be reached, tried again later: {type(error).__name__}: {error}")
                is_told = True
                # The tracker may have stored points although its answer was lost: the next try asks for its last steps.
                self.close()
                if is_last and time.monotonic() + wait > deadline:
                    self._say(f"{self.spec.kind} is given up: it lacks the last points of this attempt")
                    return
                if is_last:
                    time.sleep(wait)
                else:
                    ended.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _open(self) -> Tracker:
        if self._tracker is None:
            self._tracker = TRACKERS[self.spec.kind](self.run, self.spec)
            self._last = self._tracker.last_steps()
            self._offset, self._state, self._tags = 0, None, {}
        return self._tracker

    def _hand_on(self) -> None:
        tracker = self._open()
        points = []
        for event in read_events(self.run.directory, self._offset):
            with contextlib.suppress(KeyError, TypeError, ValueError):  # an event of another version
                for point in points_of(event.fields):
                    # An attempt that continues from a checkpoint repeats some steps.
                    if point.step > self._last.get(point.name, -1):
                        self._last[point.name] = point.step
                        points.append(point)
                self._tags |= tags_of(event.fields)
                if event.fields["type"] == "state" and event.fields["attempt"] == self.run.attempt:
                    self._state = event.fields["state"]
            self._offset = event.end
            if len(points) >= POINTS_AT_ONCE:
                tracker.log(points)
                points = []
        if points:
            tracker.log(points)

    def _end(self) -> None:
        assert self._tracker is not None
        self._tracker.end(self._state if self._state in TERMINAL_STATES else None, self._tags)
        self.close()

    def close(self) -> None:
        """Close the tracker; the next attempt to send points opens a new connection."""
        with contextlib.suppress(Exception):
            if self._tracker is not None:
                self._tracker.close()
        self._tracker = None

    def _say(self, line: str) -> None:
        print(f"tracking: {line}", file=sys.stderr, flush=True)


def main(directory: Path) -> None:
    """Follow the run until its driver reports its end by a line on stdin, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the driver
    run, parent, ended = read_run(directory), os.getppid(), threading.Event()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    with open(directory / LOCK_FILE, "ab") as lock:
        # Two followers would send points twice: the process of an earlier attempt may still be sending its last ones.
        fcntl.flock(lock, fcntl.LOCK_EX)
        follow = [Follower(run, spec).follow for spec in run.job.tracking]
        followers = [threading.Thread(target=one, args=(ended,), daemon=True) for one in follow]
        for follower in followers:
            follower.start()
        while not ended.wait(POLL_SECONDS) and any(one.is_alive() for one in followers):
            if os.getppid() != parent:
                ended.set()
        for follower in followers:
            follower.join(LAST_WORDS_SECONDS)


def _await_end(ended: threading.Event) -> None:
    sys.stdin.readline()
    ended.set()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Libraries of trackers would wait for their servers at exit.
    leave(0)
