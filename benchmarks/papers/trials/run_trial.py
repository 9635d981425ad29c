"""The record of a trial: figures of a run of its job (trainer.search.runs), or of an experiment on texts."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.text.experiments import EXPERIMENTS
from benchmarks.papers.trials.trial import AnyTrial, TextTrial, Trial, deciding_packages
from embeddings.durable_files import write_json
from trainer.generalization.gap import gaps
from trainer.runs.directory import read_run
from trainer.runs.events import read_events, utc_now
from trainer.search.runs import TrialRun
from trainer.spec.evaluation import is_table

RECORDS, RUNS, KEPT = "points", "runs", "kept"


def path_of(trial: AnyTrial, out: Path) -> Path:
    """Return the file of a trial's record, which exists once the trial has ended."""
    return out / RECORDS / f"{trial.key}.json"


def kept_path(trial: AnyTrial, out: Path) -> Path:
    """Return the file of arrays that a trial leaves for the report."""
    return out / KEPT / f"{trial.key}.npz"


def read_record(trial: AnyTrial, out: Path) -> dict[str, Any] | None:
    """Return the record of a trial; None before it has ended, and if the file is broken."""
    try:
        record: dict[str, Any] = json.loads(path_of(trial, out).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record


def record_job(trial: Trial, run: TrialRun, out: Path, command: str) -> dict[str, Any]:
    """Measure the model of a run that is over, write the record, and remove the run unless it failed."""
    error, measured, started = run.error, {}, time.monotonic()
    if error is None and trial.measured_by:
        from benchmarks.papers.trials.post_training_metrics import MEASURES

        kept_path(trial, out).parent.mkdir(parents=True, exist_ok=True)
        try:
            measured = MEASURES[trial.measured_by](read_run(run.path), kept_path(trial, out))
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    seconds = spent(run.path) + time.monotonic() - started
    record = _record(trial, error, metrics_of(run.path), seconds, command) | {
        "measured": measured,
        "alpha": _last(run.path, "info", "alpha"),
        "packages": _last(run.path, "lineage", "packages") or deciding_packages(),
        "git_commit": _last(run.path, "lineage", "git_commit"),
        "dataset_fingerprint": _last(run.path, "lineage", "dataset_fingerprint"),
    }
    _write(trial, record, out)
    if error is None:
        shutil.rmtree(run.path, ignore_errors=True)
    return record


def record_experiment(trial: TextTrial, out: Path, command: str) -> dict[str, Any]:
    """Run an experiment on texts and write its record; an error ends in the record."""
    error, metrics, started = None, list[dict[str, Any]](), time.monotonic()
    try:
        metrics = _run_experiment(trial, out)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    record = _record(trial, error, metrics, time.monotonic() - started, command)
    _write(trial, record, out)
    return record


def _record(
    trial: AnyTrial, error: str | None, metrics: list[dict[str, Any]], seconds: float, command: str
) -> dict[str, Any]:
    return {
        "name": trial.name, "key": trial.key, "state": "done" if error is None else "failed", "error": error,
        "metrics": metrics + gaps(metrics), "measured": {}, "alpha": None, "seconds": round(seconds, 1),
        "finished_at": utc_now(), "command": command, "machine": machine(), "packages": deciding_packages(),
        "git_commit": None, "dataset_fingerprint": None,
    }  # fmt: skip


def _write(trial: AnyTrial, record: dict[str, Any], out: Path) -> None:
    path_of(trial, out).parent.mkdir(parents=True, exist_ok=True)
    write_json(path_of(trial, out), record)


def _run_experiment(trial: TextTrial, out: Path) -> list[dict[str, Any]]:
    """Return the figures of an experiment; keep vectors that it yields.

    Arrays, as ``item_vectors`` of post_training_metrics keeps them: ``ids`` int64 [n], the places of texts, ``steps``
    int64 [s], their epochs, ``vectors`` float32 [s, n, dim].
    """
    figures = list(EXPERIMENTS[trial.experiment](trial.settings, trial.data, trial.seed))
    vectors = {one["epoch"]: one.pop("vectors") for one in figures if "vectors" in one}
    if vectors:
        path, rows = kept_path(trial, out), np.stack(list(vectors.values()))
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, ids=np.arange(rows.shape[1]), steps=np.array(list(vectors)), vectors=rows)
    return figures


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics for each epoch and split, in order, of the attempt that reported them last.

    Tables are numbers of their own. ``seconds``: how long the run had taken by then, from its first step, evaluation
    and all; left out from where a run was gone on with.
    """
    metrics: dict[tuple[int, str], dict[str, Any]] = {}
    start = None
    for event in read_events(directory):
        if event.fields["type"] == "state" and event.fields["state"] == "running":
            start = event.fields["time"] if event.fields["attempt"] == 1 else None
        if event.fields["type"] == "metric":
            fields = {k: v for k, v in event.fields.items() if k not in ("time", "attempt", "type") and not is_table(k)}
            for bucket in event.fields.get("frequency_buckets", ()):
                number = bucket["bucket"]
                fields |= {f"bucket_{number}_{what}": bucket[what] for what in ("auc", "norm")}
            if start is not None:
                fields["seconds"] = round(_seconds_between(start, event.fields["time"]), 3)
            metrics[fields["epoch"], fields["split"]] = fields
    return [metrics[key] for key in sorted(metrics)]


def spent(directory: Path) -> float:
    """Return the seconds of a run's attempts so far, each from its first event to its last.

    A killed attempt's last heartbeat is at most seconds old.
    """
    attempts: dict[int, list[str]] = {}
    for event in read_events(directory):
        attempts.setdefault(event.fields["attempt"], []).append(event.fields["time"])
    return sum(_seconds_between(times[0], times[-1]) for times in attempts.values())


def _seconds_between(start: str, end: str) -> float:
    first, last = (datetime.datetime.fromisoformat(time) for time in (start, end))
    return (last - first).total_seconds()


def machine() -> str:
    """Return processor and cores, for the reader."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{os.cpu_count()} cores of {name}"


def _last(directory: Path, kind: str, field: str) -> Any:
    """Return what the last event of a kind says of a field, if any."""
    said = None
    for event in read_events(directory):
        if event.fields["type"] == kind and event.fields.get(field) is not None:
            said = event.fields[field]
    return said
