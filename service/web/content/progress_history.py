"""How fast a job's last attempt trained and how its loss fell, step by step, of the events that its run wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from markupsafe import Markup

from service.web.charts.lines import Series, line_chart
from trainer.runs.events import EVENTS_FILE

READ_BYTES = 2**20
"""Bytes read from the end of events.jsonl; 1,000 progress events are about a fifth of this."""
MAX_POINTS = 200


def progress_charts(run_dir: Path, attempt: int) -> list[dict[str, Any]]:
    """Return charts of examples per second and of the training loss over steps; none before there are two points.

    Blocking.
    """
    told = [event for event in _progress(run_dir / EVENTS_FILE) if event.get("attempt") == attempt]
    told = told[:: max(1, len(told) // MAX_POINTS)]
    charts = []
    for field, title, unit in (
        ("examples_per_second", "Examples per second", "examples/s"),
        ("loss", "Training loss, mean of the epoch so far", "loss"),
    ):
        points = [(event["step"], float(event[field])) for event in told if event.get(field) is not None]
        if len(points) > 1:
            svg: Markup = line_chart([Series("attempt", points)], title, unit, axis="step")
            charts.append({"title": title, "svg": svg, "last": points[-1][1]})
    return charts


def _progress(file: Path) -> list[dict[str, Any]]:
    try:
        with open(file, "rb") as events:
            events.seek(max(0, os.fstat(events.fileno()).st_size - READ_BYTES))
            lines = events.read().split(b"\n")
    except FileNotFoundError:
        return []
    told = []
    for line in lines:
        if b'"progress"' not in line:
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # cut off: the first of what was read, or one that is being written
            continue
        if event.get("type") == "progress" and isinstance(event.get("step"), int):
            told.append(event)
    return told
