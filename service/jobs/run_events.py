"""Applies the events in a run's event file to its job's row.

Each event is applied once, in the transaction that moves the offset. Events are ignored if their attempt is not the
row's, or if its lease was revoked because it was given up.
"""

from __future__ import annotations

import datetime
import logging
import os
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import tables
from service.core.settings import MIN_FREE_BYTES
from service.core.text_validation import storable
from service.jobs import job_records
from service.jobs.executors.base import read_record
from service.jobs.job_row import JobRow
from service.jobs.states import ACTIVE, backoff_seconds
from trainer.runs.events import EVENTS_FILE, TERMINAL_STATES, Event, read_events
from trainer.runs.protocol import EXIT_ENVIRONMENT, EXIT_FILE, LOG_FILE
from trainer.spec.stored_specs import StoredJob

log = logging.getLogger("evenkeel.runner")

EVENTS_AT_ONCE = 1000
LAST_LINE_BYTES = 500
"""Most bytes of a log's last line in the error of a run that ended without a report."""
PROGRESS_FIELDS = (
    "epoch", "epochs", "step", "steps", "examples", "examples_per_second", "step_seconds", "waited_seconds", "loss",
    "starved", "cores", "memory_bytes", "files", "files_behind", "seconds_behind", "late_files", "messages_behind",
    "bad_rows",
)  # fmt: skip
PREPARATION_FIELDS = ("stage", "rows", "total_rows", "rows_per_second")
PUBLICATION_FIELDS = (
    "diagnosis", "held_in_a_row", "held_since", "max_held", "released", "comparison", "quality", "proposed_canary",
)  # fmt: skip
METRIC_FIELDS = ("type", "time", "attempt", "epoch", "split")


async def apply(
    connection: AsyncConnection, row: JobRow, run_dir: Path, alive: bool, backoff_base_seconds: float
) -> bool:
    """Apply the events in the run's event file that follow the row's offset.

    The run reports ``failed`` a moment before it writes ``exit.json``, which says whether a retry may help. While the
    run is alive, that event is not applied before the file exists.

    Returns:
        True if there may be more events, so that this should be called again.
    """
    offset, held = row["events_offset"], False
    if size(run_dir) < offset:
        offset = 0  # someone removed the directory: a retry begins a new file
    events = list(islice(read_events(run_dir, offset), EVENTS_AT_ONCE))
    for event in events:
        if event.fields.get("attempt") == row["attempt"] and row["lease"] is not None:
            if event.fields.get("state") == "failed" and alive and read_exit(run_dir, row["attempt"]) is None:
                held = True
                break
            try:
                await _one(connection, row, event, run_dir, backoff_base_seconds)
            except (KeyError, TypeError, ValueError):
                log.exception("job %s: an event that cannot be understood is skipped: %s", row["id"], event.fields)
        offset = event.end
    if offset != row["events_offset"]:
        await job_records.change(connection, row, events_offset=offset)
    return len(events) == EVENTS_AT_ONCE and not held


async def _one(connection: AsyncConnection, row: JobRow, event: Event, run_dir: Path, base_seconds: float) -> None:
    fields = event.fields
    kind = fields["type"]
    if row["reason"] is not None and row["state"] in ACTIVE:
        await job_records.change(connection, row, reason=None)  # the reason was its silence
    if kind == "heartbeat":
        if not is_training(row):  # a driver sends heartbeats even if its ranks hang: then only steps are signs of life
            await job_records.change(connection, row, heartbeat_at=_time(fields))
    elif kind == "progress":
        progress = {name: fields[name] for name in PROGRESS_FIELDS if name in fields}
        await job_records.change(connection, row, progress=progress, heartbeat_at=_time(fields))
        await _record_newest(connection, row, kind, progress)
    elif kind == "preparation":
        preparation = {name: fields[name] for name in PREPARATION_FIELDS}
        await job_records.change(connection, row, preparation=preparation, heartbeat_at=_time(fields))
        await _record_newest(connection, row, kind, preparation)
    elif kind in ("begin", "phase"):
        phase = {"phase": str(fields["name"])} if kind == "begin" else {}
        progress = {name: value for name, value in (row["progress"] or {}).items() if name != "phase"} | phase
        await job_records.change(connection, row, progress=progress or None)
        if kind == "phase" and fields["name"] == "prepare":
            await job_records.change(connection, row, preparation=None)
    elif kind == "metric":
        await _metric(connection, row, fields)
    elif kind == "history":
        await _history(connection, row, fields["metrics"])
    elif kind == "publication":
        await _publication(connection, row, fields)
    elif kind == "error":
        await job_records.change(connection, row, error=_error(fields))
    elif kind == "lineage":
        lineage = {name: value for name, value in fields.items() if name not in ("type", "time", "attempt")}
        await job_records.change(connection, row, lineage=lineage)
    elif kind == "workers":
        attempts = job_records.with_attempt(
            row["attempts"], row["attempt"], int(fields["number"]), str(fields["because"])
        )
        await job_records.change(connection, row, attempts=attempts)
        await job_records.record(connection, row["id"], "workers", attempts[-1])
    elif kind == "state" and fields.get("state") == "cancelled" and row["state"] != "cancelling":
        await preempted(connection, row, base_seconds)
    elif kind == "state" and fields.get("state") == "failed":
        ended = read_exit(run_dir, row["attempt"]) or {}
        unexplained = {"code": "failed", "message": "the run failed", "remedy": "see its log"}
        # On a full disk the error event may be lost and exit.json still be written.
        error = row["error"] or (_error(ended["error"]) if ended.get("error") else unexplained)
        await fail(connection, row, error, bool(ended.get("retryable")), base_seconds)
    elif kind == "state" and fields.get("state") in ("running", "publishing", *TERMINAL_STATES):
        await job_records.move(connection, row, fields["state"])


async def _record_newest(connection: AsyncConnection, row: JobRow, kind: str, data: dict[str, Any]) -> None:
    """Record an event and delete earlier events of its kind: a day-long run would otherwise leave a row per second."""
    table = tables.job_event
    await connection.execute(table.delete().where(table.c.job_id == row["id"], table.c.type == kind))
    await job_records.record(connection, row["id"], kind, data)


async def _publication(connection: AsyncConnection, row: JobRow, fields: dict[str, Any]) -> None:
    """Store the outcome of a publication; a job that publishes several times gets an event for each version."""
    publication = {name: fields.get(name) for name in ("status", "collection", "version")}
    publication |= {"reasons": fields.get("reasons") or [], "gate": fields.get("gate") or []}
    publication |= {name: fields[name] for name in PUBLICATION_FIELDS if fields.get(name) is not None}
    if fields.get("step") is None:
        await job_records.change(connection, row, publication=publication)
        return
    publication["step"] = int(fields["step"])
    # The last publication is reported again when the job ends.
    is_known = (row["publication"] or {}).get("step") == publication["step"]
    await job_records.change(connection, row, publication=publication)
    if not is_known:
        await job_records.record(connection, row["id"], "publication", publication)
        await job_records.tell_publication(connection, row)


async def _metric(connection: AsyncConnection, row: JobRow, fields: dict[str, Any]) -> None:
    """Store the metrics of an epoch; an epoch repeated after a resume replaces its earlier values."""
    table = tables.job_metric
    epoch, split = int(fields["epoch"]), str(fields["split"])
    values = {name: value for name, value in fields.items() if name not in METRIC_FIELDS}
    same = sa.and_(table.c.job_id == row["id"], table.c.epoch == epoch, table.c.split == split)
    await connection.execute(table.delete().where(same))
    await connection.execute(table.insert().values(job_id=row["id"], epoch=epoch, split=split, values=values))
    await job_records.record(connection, row["id"], "metric", {"epoch": epoch, "split": split, **values})


async def _history(connection: AsyncConnection, row: JobRow, metrics: list[dict[str, Any]]) -> None:
    """Store the metrics in ``metrics`` that are not stored yet because an earlier attempt could not report them."""
    table = tables.job_metric
    rows = await connection.execute(sa.select(table.c.epoch, table.c.split).where(table.c.job_id == row["id"]))
    stored = {(epoch, split) for epoch, split in rows}
    for metric in metrics:
        if (int(metric["epoch"]), str(metric["split"])) not in stored:
            await _metric(connection, row, metric)


async def fail(
    connection: AsyncConnection, row: JobRow, error: dict[str, Any], retryable: bool, base_seconds: float
) -> None:
    """End a failed attempt: queue the job again with backoff if it is retryable and has retries left, else fail it."""
    failures = row["failures"] + 1 if retryable else row["failures"]
    retries = StoredJob(row["spec"]).retries
    if retryable and failures <= retries:
        wait = backoff_seconds(failures, base_seconds)
        due = tables.now() + datetime.timedelta(seconds=wait)
        reason = f"retry {failures} of {retries} in {wait:g} s: {error['message']}"
        values = {"failures": failures, "not_before": due, "reason": reason, "error": error, "launched_at": None}
        await job_records.move(connection, row, "interrupted", **values)
    else:
        await job_records.move(connection, row, "lost" if retryable else "failed", failures=failures, error=error)


async def preempted(connection: AsyncConnection, row: JobRow, base_seconds: float) -> None:
    """Queue a job again whose run ended because its machine told it to; this does not count as a failure.

    Such a run received SIGTERM from a service manager, Kubernetes or Ray, or its node was drained, without a request by
    this service. The run has written a checkpoint if it had taken a step.
    """
    due = tables.now() + datetime.timedelta(seconds=base_seconds)
    reason = f"preempted: its machine asked it to end; it continues from its checkpoint in {base_seconds:g} s"
    await job_records.move(connection, row, "interrupted", not_before=due, reason=reason, error=None, launched_at=None)


async def died(
    connection: AsyncConnection, row: JobRow, run_dir: Path, base_seconds: float, exit_code: int | None
) -> None:
    """End an attempt whose run is gone without reporting its end: killed, out of memory, or the machine restarted."""
    ended = read_exit(run_dir, row["attempt"])
    if ended is not None and ended.get("state") in TERMINAL_STATES and ended["state"] != "failed":
        # The last event was lost, perhaps on a full disk, but the exit file was written.
        if ended["state"] == "cancelled" and row["state"] != "cancelling":
            await preempted(connection, row, base_seconds)
            return
        await job_records.move(connection, row, ended["state"])
        return
    error = unreported(run_dir, row["launched_at"], exit_code)
    retryable = exit_code != EXIT_ENVIRONMENT if ended is None else bool(ended.get("retryable"))
    if ended is not None and ended.get("error"):
        error = _error(ended["error"])
    await fail(connection, row, error, retryable, base_seconds)


def unreported(run_dir: Path, launched_at: datetime.datetime | None, exit_code: int | None) -> dict[str, str]:
    """Return the error for an attempt that ended without a report; ``exit_code``: the executor's, if known."""
    last_line = _last_line(run_dir, launched_at)
    if exit_code == EXIT_ENVIRONMENT:
        return {
            "code": "wrong-environment",
            "message": f"the cluster cannot execute runs, by its exit code {exit_code}: {last_line}",
            "remedy": "start Ray on every node in an environment with this service's version of Evenkeel, then retry",
        }
    try:
        free = shutil.disk_usage(run_dir).free
    except OSError:
        return {
            "code": "run-directory-gone",
            "message": f"the run's directory {run_dir} was removed while it ran",
            "remedy": "leave $EVENKEEL_HOME/runs to the service; a retry begins anew, without the checkpoints",
        }
    ended = "the run ended without a report" + ("" if exit_code is None else f", with exit code {exit_code}")
    said = f"; the last line of its log is: {last_line}" if last_line else ""
    if free < MIN_FREE_BYTES:
        return {
            "code": "disk_full",
            "message": f"{ended}: the disk of {run_dir} is full, {free} bytes are free{said}",
            "remedy": "free space where the run directory is, then retry",
        }
    if said:
        remedy = "see the run's log; if it says nothing of an error, look for the kernel's out-of-memory killer"
        return {"code": "run-died", "message": f"{ended}{said}", "remedy": remedy}
    remedy = "if it happens again look for the kernel's out-of-memory killer, and see the run's log"
    return {"code": "run-died", "message": f"{ended}: it was killed, or the machine restarted", "remedy": remedy}


def _last_line(run_dir: Path, since: datetime.datetime | None) -> str:
    """Return the last line of the run's log that is not empty, "" if the log was not written to since ``since``."""
    try:
        with open(run_dir / LOG_FILE, "rb") as file:
            found = os.fstat(file.fileno())
            if since is None or found.st_mtime < since.timestamp():
                return ""
            file.seek(max(0, found.st_size - LAST_LINE_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return storable(next((line.strip() for line in reversed(lines) if line.strip()), ""))


def silent(seconds: float) -> dict[str, str]:
    """Return the error for a run that is alive but reports nothing."""
    message = f"no sign of life for {seconds:.0f} s: it hangs or is stopped, and was given up"
    remedy = "see the end of its log; if the run may be silent for longer, raise EVENKEEL_SILENCE_SECONDS"
    return {"code": "run-silent", "message": message, "remedy": remedy}


def is_training(row: JobRow) -> bool:
    """Return True if the run takes steps now: it neither prepares, builds, evaluates, saves nor publishes."""
    progress = row["progress"] or {}
    return row["state"] == "running" and "step" in progress and "phase" not in progress


def stalled(progress: dict[str, Any], seconds: float) -> dict[str, str]:
    """Return the error for a run whose driver is alive but whose ranks take no steps."""
    message = f"no step after step {progress['step']} for {seconds:.0f} s: a rank hangs or is stopped"
    remedy = "see the end of its log; if steps may take longer, raise EVENKEEL_SILENCE_SECONDS"
    return {"code": "run-stalled", "message": message, "remedy": remedy}


def timed_out(limit_seconds: float) -> dict[str, str]:
    """Return the error for a run that has exceeded its time limit and did not end itself, as it should have."""
    message = f"not done after {limit_seconds:g} seconds, and it did not stop by itself"
    remedy = "set resources.timeout_seconds higher, then retry: training continues from the last checkpoint"
    return {"code": "timeout", "message": message, "remedy": remedy}


def size(run_dir: Path) -> int:
    """Return the number of bytes in the run's event file; 0 if there is none."""
    try:
        return (run_dir / EVENTS_FILE).stat().st_size
    except FileNotFoundError:
        return 0


def read_exit(run_dir: Path, attempt: int) -> dict[str, Any] | None:
    """Return ``exit.json`` of this attempt if it exists."""
    document = read_record(run_dir / EXIT_FILE)
    return document if document.get("attempt") == attempt else None


def _error(fields: dict[str, Any]) -> dict[str, str]:
    error = {name: storable(str(fields.get(name) or "")) for name in ("code", "message", "remedy")}
    # Errors in data repeat their remedy in brackets at the end of the message.
    error["message"] = error["message"].removesuffix(f" ({error['remedy']})") or error["message"]
    return error


def _time(fields: dict[str, Any]) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(str(fields["time"]).replace("Z", "+00:00"))
    except (KeyError, ValueError):
        return tables.now()
