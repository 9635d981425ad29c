"""From the events of a run to points of curves and to what a tracker is told besides."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.runs.directory import Run
from trainer.runs.trackers.base import Point

_POSITION = ("type", "time", "attempt", "epoch", "epochs", "step", "steps", "split")
_NOT_PARAMETERS = {"labels", "tracking", "spec_version"}


def points_of(event: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the points of an event: of progress by step, of metrics by epoch, or by window of a progressive one."""
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
    """Return an event's tags of the whole run: the outcome of its publication, and the reason for its failure."""
    if event["type"] == "publication":
        told = {name: event.get(name) for name in ("status", "collection", "version")}
        return {f"publication.{name}": str(value) for name, value in told.items() if value is not None}
    if event["type"] == "error":
        return {"error": f"{event.get('code')}: {event.get('message')}"}
    return {}


def parameters_of(run: Run) -> dict[str, str]:
    """Return the job's fields by their path, such as ``optimizer.kind``; lists as JSON."""
    parameters: dict[str, str] = {}

    def enter(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                enter(f"{path}.{name}" if path else name, part)
        elif value is not None:
            parameters[path] = value if isinstance(value, str) else json.dumps(value)

    enter("", run.submitted.model_dump(mode="json", exclude=_NOT_PARAMETERS))
    return parameters
