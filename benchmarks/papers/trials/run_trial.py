"""The record of a trial: the figures of its job's run, or of an experiment on texts."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.trials.experiments import EXPERIMENTS
from benchmarks.papers.trials.trial import AnyTrial, TextTrial, Trial
from embeddings.durable_files import write_json
from trainer.generalization.sections import gaps
from trainer.search.records import Record, new_record, record_of_run
from trainer.search.runs import TrialRun

RECORDS, RUNS, KEPT = "points", "runs", "kept"


def path_of(trial: AnyTrial, out: Path) -> Path:
    """Return the file of a trial's record, which exists once the trial has ended."""
    return out / RECORDS / f"{trial.key}.json"


def kept_path(trial: AnyTrial, out: Path) -> Path:
    """Return the file of arrays that a trial stores for the report."""
    return out / KEPT / f"{trial.key}.npz"


def read_record(trial: AnyTrial, out: Path) -> Record | None:
    """Return the record of a trial; None if it has not ended or the file is broken."""
    try:
        record: Record = json.loads(path_of(trial, out).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record


def record_job(trial: Trial, run: TrialRun, out: Path, command: str) -> Record:
    """Measure the model of an ended run, write the record, and remove the run unless it failed."""
    from benchmarks.papers.trials.post_training_metrics import MEASURES

    arrays, measure = kept_path(trial, out), MEASURES.get(trial.measured_by)
    arrays.parent.mkdir(parents=True, exist_ok=True)
    record = record_of_run(run, trial.name, trial.key, command, measure and (lambda of: measure(of, arrays)))
    record["metrics"] += gaps(record["metrics"])
    _write(trial, record, out)
    if record["state"] == "done":
        shutil.rmtree(run.path, ignore_errors=True)
    return record


def record_experiment(trial: TextTrial, out: Path, command: str) -> Record:
    """Run an experiment on texts and write its record; an error is written to the record."""
    error, metrics, started = None, list[dict[str, Any]](), time.monotonic()
    try:
        metrics = _run_experiment(trial, out)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    record = new_record(trial.name, trial.key, error, metrics + gaps(metrics), time.monotonic() - started, command)
    _write(trial, record, out)
    return record


def _write(trial: AnyTrial, record: Record, out: Path) -> None:
    path_of(trial, out).parent.mkdir(parents=True, exist_ok=True)
    write_json(path_of(trial, out), record)


def _run_experiment(trial: TextTrial, out: Path) -> list[dict[str, Any]]:
    """Return the figures of an experiment, and store the vectors that it yields.

    The arrays have the form of ``item_vectors`` in post_training_metrics: ``ids`` int64 [n], the positions of texts;
    ``steps`` int64 [s], the epochs; ``vectors`` float32 [s, n, dim].
    """
    figures = list(EXPERIMENTS[trial.experiment](trial.settings, trial.data, trial.seed))
    vectors = {one["epoch"]: one.pop("vectors") for one in figures if "vectors" in one}
    if vectors:
        path, rows = kept_path(trial, out), np.stack(list(vectors.values()))
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, ids=np.arange(rows.shape[1]), steps=np.array(list(vectors)), vectors=rows)
    return figures
