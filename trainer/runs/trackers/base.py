"""Points of curves, from a run's events, the interface of trackers, which receive them, and the trackers' process."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.runs.directory import Run

_POSITION = ("type", "time", "attempt", "epoch", "epochs", "step", "steps", "split")
_NOT_PARAMETERS = {"labels", "tracking", "spec_version"}
LAST_WORDS_SECONDS = 10.0
"""Longest time that an ended run's trackers may take for the last points."""
_START_SECONDS = 20.0
"""Further time for the process to start and exit, before it is killed."""


class Point(NamedTuple):
    """One value of a curve. ``step`` is the training step for curves ``train/...``, and the epoch for all others."""

    name: str
    value: float
    step: int
    time: float
    """Seconds since 1970."""


class Tracker(Protocol):
    """Receiver of the curves of one run. Every method may block, and raises its own errors."""

    def last_steps(self) -> dict[str, int]:
        """Return {curve: last step that the tracker has received, in this or an earlier attempt}."""

    def log(self, points: Sequence[Point]) -> None:
        """Send points to the tracker. Points of a curve must come in the order of their steps."""

    def end(self, state: str | None, tags: Mapping[str, str]) -> None:
        """Send the final state of the attempt (None if it was killed) and the tags of the run (:func:`tags_of`)."""

    def close(self) -> None:
        """Close files and connections."""


class TrackerUnusableError(RuntimeError):
    """An error that another try cannot fix, such as a package that is not installed; the message has the remedy."""


def points_of(event: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the points of an event: training progress by step, metrics by epoch, progressive metrics by window."""
    if event["type"] == "progress":
        yield from _points("train", event, int(event["step"]), event)
    elif event["type"] == "metric":
        yield from _points(str(event["split"]), event, int(event["epoch"]), event)
    elif event["type"] == "history":
        for metric in event["metrics"]:
            yield from _points(str(metric["split"]), metric, int(metric["epoch"]), event)


def _points(prefix: str, fields: Mapping[str, Any], step: int, event: Mapping[str, Any]) -> Iterator[Point]:
    seconds = datetime.datetime.fromisoformat(str(event["time"])).timestamp()
    for name, value in fields.items():
        if name not in _POSITION and isinstance(value, int | float) and not isinstance(value, bool):
            yield Point(f"{prefix}/{name}", float(value), step, seconds)


def tags_of(event: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's tags that an event gives: the outcome of a publication, or the reason for a failure."""
    if event["type"] == "publication":
        told = {name: event.get(name) for name in ("status", "collection", "version")}
        return {f"publication.{name}": str(value) for name, value in told.items() if value is not None}
    if event["type"] == "error":
        return {"error": f"{event.get('code')}: {event.get('message')}"}
    return {}


def parameters_of(run: Run) -> dict[str, str]:
    """Return the values of the job's fields as text, by their path, such as ``optimizer.kind``; lists are JSON."""
    parameters: dict[str, str] = {}

    def enter(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                enter(f"{path}.{name}" if path else name, part)
        elif value is not None:
            parameters[path] = value if isinstance(value, str) else json.dumps(value)

    enter("", run.submitted.model_dump(mode="json", exclude=_NOT_PARAMETERS))
    return parameters


@contextlib.contextmanager
def tracked(run: Run) -> Iterator[None]:
    """Send the curves of the run to its trackers while the block runs. Any failure only writes lines to the log.

    A separate process does it, so that neither the trackers' libraries nor a hanging server can disturb the run.
    """
    if not run.job.tracking:
        yield
        return
    root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, "-m", "trainer.runs.trackers.follow", str(run.directory)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    except OSError as error:
        print(f"no tracking: its process cannot be started: {error}", file=sys.stderr, flush=True)
        yield
        return
    try:
        yield
    finally:
        try:
            process.communicate(b"end\n", timeout=LAST_WORDS_SECONDS + _START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            print("no tracking: its process did not end and was killed", file=sys.stderr, flush=True)
