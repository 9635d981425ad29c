"""One trial of a recipe: an ordinary run on this host (trainer.launch.in_process), and its figures in one file."""

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
from trainer.runs.events import read_events, utc_now
from trainer.runs.protocol import EXIT_CANCELLED
from trainer.spec.evaluation import is_table

RECORDS, RUNS, LOGS, KEPT = "points", "runs", "logs", "kept"
WAIT_SECONDS = 60.0
"""For a killed grid's task that still holds a run directory: its process ends by itself."""


class Stopped(Exception):
    """A trial was asked to stop, and has written a checkpoint from which it will go on."""


def path_of(trial: AnyTrial, out: Path) -> Path:
    """Return the file of a trial's figures, which exists once it has ended."""
    return out / RECORDS / f"{trial.key}.json"


def kept_path(trial: AnyTrial, out: Path) -> Path:
    """Return the file of arrays that a trial leaves for the report."""
    return out / KEPT / f"{trial.key}.npz"


def read_record(trial: AnyTrial, out: Path) -> dict[str, Any] | None:
    """Return what is known of a trial; None before it has ended, and for a file that nobody can read."""
    try:
        record: dict[str, Any] = json.loads(path_of(trial, out).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record


def run_trial(trial: AnyTrial, out: Path, command: str) -> dict[str, Any]:
    """Train a trial, a job from where a killed attempt was, measure what it has to, and write its record.

    The record: ``state`` (done or failed), ``error``, ``metrics`` (one for each epoch and split, the gap among them),
    ``measured`` (of its ``measured_by``), ``alpha``, ``seconds`` (of all its attempts together), where and with what.
    Errors of a run end in the record. Must be called on the main thread.

    Raises:
        Stopped: it was asked to stop.
    """
    directory = out / RUNS / trial.key
    log = out / LOGS / f"{trial.key}.log"
    for folder in (path_of(trial, out).parent, log.parent, directory.parent):
        folder.mkdir(parents=True, exist_ok=True)
    before, started = spent(directory), time.monotonic()
    error: str | None = None
    measured: dict[str, Any] = {}
    metrics: list[dict[str, Any]] | None = None
    with open(log, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            if isinstance(trial, TextTrial):
                metrics = _run_experiment(trial, out)
            else:
                error = _train(trial, directory)
                if error is None and trial.measured_by:
                    measured = _measured(trial, directory, out)
        except (Stopped, KeyboardInterrupt):
            raise
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    metrics = metrics_of(directory) if metrics is None else metrics
    record = {
        "name": trial.name,
        "key": trial.key,
        "state": "done" if error is None else "failed",
        "error": error,
        "metrics": metrics + gaps(metrics),
        "measured": measured,
        "alpha": _last(directory, "info", "alpha"),
        "seconds": round(before + time.monotonic() - started, 1),
        "finished_at": utc_now(),
        "command": command,
        "machine": machine(),
        "packages": _last(directory, "lineage", "packages") or deciding_packages(),
        "git_commit": _last(directory, "lineage", "git_commit"),
        "dataset_fingerprint": _last(directory, "lineage", "dataset_fingerprint"),
    }
    write_json(path_of(trial, out), record)
    if error is None:
        shutil.rmtree(directory, ignore_errors=True)
    return record


def _train(trial: Trial, directory: Path) -> str | None:
    """Train a trial; return None, or why it failed.

    Raises:
        Stopped: it was asked to stop.
    """
    from trainer.launch.driver import RunBusyError
    from trainer.launch.in_process import train

    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            code = train(trial.dataset, trial.job, run_dir=directory, store=str(directory / "store"))
            break
        except RunBusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    if code == 0:
        return None
    if code == EXIT_CANCELLED:
        raise Stopped(trial.name)
    return f"{_last(directory, 'error', 'message')}. Remedy: {_last(directory, 'error', 'remedy')}"


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


def _measured(trial: Trial, directory: Path, out: Path) -> dict[str, Any]:
    from benchmarks.papers.trials.post_training_metrics import MEASURES
    from trainer.runs.directory import read_run

    path = kept_path(trial, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    return MEASURES[trial.measured_by](read_run(directory), path)


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
