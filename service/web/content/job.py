"""One job: progress, curves and metrics, speed, log, spec, lineage, and resources."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from service.core import tables
from service.jobs import job_records
from service.jobs.job_row import JobView
from service.jobs.states import TERMINAL, Refused, transition
from service.web.charts.lines import Series, line_chart
from service.web.content.job_rows import job_row
from service.web.report import charts_of, epoch_chart, figures_of, report
from service.web.request import DashboardRequest
from trainer.runs.events import EVENTS_FILE
from trainer.runs.protocol import LOG_FILE
from trainer.spec.stored_specs import StoredJob

LOG_BYTES = 2**16
"""Number of bytes at the end of the log that the page shows first."""
READ_BYTES = 2**20
"""Number of bytes read from the end of events.jsonl; 1,000 progress events take about a fifth of it."""
MAX_POINTS = 200
LONG_SECONDS = 7200
"""Time of a run from which on its charts count minutes."""
Told = tuple[str, str, str, Callable[[float], float]]
"""A chart of progress events: the field, the title, the unit, and the value shown for one of the field."""
SPEED: tuple[Told, ...] = (
    ("examples_per_second", "Examples per second", "examples/s", float),
    ("loss", "Training loss, mean of the epoch so far", "loss", float),
)
USE: tuple[Told, ...] = (
    ("memory_bytes", "Resident memory of all ranks", "GiB", lambda number: number / 2**30),
    ("cores", "Processors that all ranks ran on", "cores", float),
    ("starved", "Share of the wanted processor time, rank with the least", "%", lambda share: 100 * (1 - share)),
)


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return the content for the job that the address names.

    Raises:
        Problem: 404 for a job that is not of the key's tenant.
    """
    job_id = request.path["job_id"]
    async with request.state.database.read() as connection:
        row = await job_records.get(connection, job_id, request.principal.sees)
        job = await job_records.view(connection, row)
    run_dir = request.state.settings.run_dir(job_id)
    document = report(JobView(**job).model_dump(mode="json"))
    return {
        "job": job_row(job, tables.now()),
        "finding": document["finding"] if job["metrics"] else None,
        "drift": document["drift"],
        "warnings": document["warnings"],
        **{name: (document["publication"] or {}).get(name) for name in ("comparison", "quality", "proposed_canary")},
        "loss": loss_chart(job),
        "charts": charts_of(document),
        **await asyncio.to_thread(progress_charts, run_dir, job["attempt"], job["started_at"]),
        "log_offset": await asyncio.to_thread(_log_offset, run_dir / LOG_FILE),
        "parent_job": parent_job(job),
        "resources": StoredJob(job["spec"]).resources,
        "has_ended": job["state"] in TERMINAL,
        "can_cancel": not isinstance(transition(job["state"], "cancel"), Refused),
        "can_retry": not isinstance(transition(job["state"], "retry"), Refused),
        **figures_of(document),
    }


def parent_job(job: dict[str, Any]) -> str | None:
    """Return the id of the job from whose checkpoint a job began; None if the job began anew."""
    match = re.search(r"job_[0-9a-z]{19}", str((job["lineage"] or {}).get("warm_start") or ""))
    return StoredJob(job["spec"]).parent_job if match is None else match[0]


def loss_chart(job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the curves of the training loss and of the held-out log loss; None before the first epoch's end."""
    return epoch_chart(job, "loss", (("train", "loss"), ("validation", "logloss"), ("test", "logloss")))


def _log_offset(file: Path) -> int:
    try:
        return max(0, file.stat().st_size - LOG_BYTES)
    except FileNotFoundError:
        return 0


def progress_charts(run_dir: Path, attempt: int, begun: datetime.datetime | None) -> dict[str, list[dict[str, Any]]]:
    """Return ``speed``, charts over steps, and ``use``, charts of processors and memory over the time since ``begun``.

    A chart has two points or more. Blocking.
    """
    events = [event for event in _progress(run_dir / EVENTS_FILE) if event.get("attempt") == attempt]
    events = events[:: max(1, len(events) // MAX_POINTS)]
    times = [0 if begun is None else max(0, int((event["at"] - begun).total_seconds())) for event in events]
    axis, unit = ("minute", 60) if max(times, default=0) > LONG_SECONDS else ("second", 1)
    return {
        "speed": _charts(events, SPEED, "step", [event["step"] for event in events]),
        "use": _charts(events, USE, axis, [seconds // unit for seconds in times]),
    }


def _charts(events: list[dict[str, Any]], told: tuple[Told, ...], axis: str, places: list[int]) -> list[dict[str, Any]]:
    charts = []
    for field, title, unit, shown in told:
        points = [
            (place, shown(event[field]))
            for place, event in zip(places, events, strict=True)
            if event.get(field) is not None
        ]
        if len(points) > 1:
            svg: Markup = line_chart([Series("attempt", points)], title, unit, axis, from_zero=told is USE)
            charts.append({"title": title, "unit": unit, "svg": svg, "last": points[-1][1]})
    return charts


def _progress(file: Path) -> list[dict[str, Any]]:
    """Return the progress events at the end of the file, each with its time in ``at``."""
    try:
        with open(file, "rb") as events:
            events.seek(max(0, os.fstat(events.fileno()).st_size - READ_BYTES))
            lines = events.read().split(b"\n")
    except FileNotFoundError:
        return []
    progress = []
    for line in lines:
        if b'"progress"' not in line:
            continue
        try:
            event = json.loads(line)
            event["at"] = datetime.datetime.fromisoformat(event["time"])
        # An incomplete line: the first one read, or one that is being written.
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if event.get("type") == "progress" and isinstance(event.get("step"), int):
            progress.append(event)
    return progress
