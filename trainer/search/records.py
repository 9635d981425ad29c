"""Records of trials: figures of a run by epoch, with what, where and how long it trained."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.runs.directory import Run, read_run
from trainer.runs.events import read_events, utc_now
from trainer.runs.lineage import installed_packages
from trainer.search.runs import TrialRun
from trainer.spec.evaluation import is_table

Record = dict[str, Any]
Measure = Callable[[Run], dict[str, Any]]
DECIDING_PACKAGES = ("evenkeel", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")
"""Packages whose versions may affect a trial's figures."""


def new_record(
    name: str, key: str, error: str | None, metrics: list[dict[str, Any]], seconds: float, command: str
) -> Record:
    """Return a record in the state "done", or "failed" if there is an error."""
    return {
        "name": name, "key": key, "state": "done" if error is None else "failed", "error": error, "metrics": metrics,
        "measured": {}, "alpha": None, "seconds": round(seconds, 1), "finished_at": utc_now(), "command": command,
        "machine": machine(), "packages": deciding_packages(), "git_commit": None, "dataset_fingerprint": None,
    }  # fmt: skip


def record_of_run(run: TrialRun, name: str, key: str, command: str, measure: Measure | None = None) -> Record:
    """Return the record of a run that has ended. ``measure`` is called first; the record has its result or error."""
    error, measured, started = run.error, dict[str, Any](), time.monotonic()
    if error is None and measure is not None:
        try:
            measured = measure(read_run(run.path))
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    seconds = spent(run.path) + time.monotonic() - started
    record = new_record(name, key, error, metrics_of(run.path), seconds, command) | {"measured": measured}
    said = {
        "alpha": last_said(run.path, "info", "alpha"),
        **{field: last_said(run.path, "lineage", field) for field in ("packages", "git_commit", "dataset_fingerprint")},
    }
    return record | {field: value for field, value in said.items() if value is not None}


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics for each epoch and split, in order, of the attempt that reported them last.

    Entries of ``frequency_buckets`` become metrics such as ``bucket_0_auc``; other tables are left out.
    """
    metrics: dict[tuple[int, str], dict[str, Any]] = {}
    for event in read_events(directory):
        if event.fields["type"] == "metric":
            fields = {k: v for k, v in event.fields.items() if k not in ("time", "attempt", "type") and not is_table(k)}
            for bucket in event.fields.get("frequency_buckets", ()):
                number = bucket["bucket"]
                fields |= {f"bucket_{number}_{what}": bucket[what] for what in ("auc", "norm")}
            metrics[fields["epoch"], fields["split"]] = fields
    return [metrics[key] for key in sorted(metrics)]


def spent(directory: Path) -> float:
    """Return the seconds of a run's attempts so far, each from its first event to its last.

    A killed attempt's last heartbeat is at most seconds old.
    """
    attempts: dict[int, list[datetime.datetime]] = {}
    for event in read_events(directory):
        times = attempts.setdefault(event.fields["attempt"], [])
        times.append(datetime.datetime.fromisoformat(event.fields["time"]))
    return sum((times[-1] - times[0]).total_seconds() for times in attempts.values())


def machine() -> str:
    """Return a text with the number of cores and the processor's name."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{os.cpu_count()} cores of {name}"


def last_said(directory: Path, kind: str, field: str) -> Any:
    """Return a field from the last event of a type that has the field, or None."""
    said = None
    for event in read_events(directory):
        if event.fields["type"] == kind and event.fields.get(field) is not None:
            said = event.fields[field]
    return said


def deciding_packages() -> dict[str, str]:
    """Return the versions of DECIDING_PACKAGES."""
    return {name: version for name, version in installed_packages().items() if name in DECIDING_PACKAGES}


def facts(records: Sequence[Record]) -> str:
    """Return the command, date, machine, versions and run time of the runs that a table shows."""
    unique = {record["key"]: record for record in records}.values()
    days = sorted({record["finished_at"][:10] for record in unique})
    packages: dict[str, set[str]] = {}
    for record in unique:
        for name, version in record["packages"].items():
            packages.setdefault(name, set()).add(version)
    versions = ", ".join(f"{name} {' and '.join(sorted(releases))}" for name, releases in packages.items())
    commits = sorted({record["git_commit"][:12] for record in unique if record["git_commit"]})
    commands = ", ".join(f"`{command}`" for command in sorted({record["command"] for record in unique}))
    machines = " and ".join(sorted({record["machine"] for record in unique}))
    seconds = sum(record["seconds"] for record in unique)
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    code = f"; commit {', '.join(commits)}" if commits else ""
    return (
        f"{commands}; {when}; {machines}; {versions}{code}; {len(unique)} runs, {seconds:,.0f} seconds of their clocks "
        "together."
    )
