"""Ours, as users run it: a job of ``trainer.launch.in_process``, which ``evenkeel train`` calls.

The job's figures are taken from its own events.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.batches.prepared import PreparedData
from trainer.launch.in_process import train
from trainer.runs.events import read_events
from trainer.spec import DatasetSpec, JobSpec


def events_of(dataset: DatasetSpec, job: JobSpec, folder: Path, prepared: Path) -> list[dict[str, Any]]:
    """Run the job and return its events; its files are in ``folder`` for as long as it takes.

    Must be called on the main thread.

    Args:
        dataset: the dataset that the job names.
        job: the job to run.
        folder: an existing folder, for the run's files.
        prepared: folder of the job's coded rows, which the run reads instead of preparing them.

    Raises:
        RuntimeError: The run fails, or did not use these rows.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="run-") as within:
        directory = Path(within) / "run"
        shutil.copytree(prepared, directory / "data", copy_function=os.link)
        with contextlib.redirect_stdout(sys.stderr):
            code = train(dataset, job, run_dir=directory, store=str(Path(within) / "store"))
        events = [event.fields for event in read_events(directory)]
        same = PreparedData.fingerprint_of(directory / "data") == PreparedData.fingerprint_of(prepared)
    if code != 0:
        errors = [event for event in events if event["type"] == "error"]
        raise RuntimeError(f"job {job.name} ended with exit code {code}: {errors}")
    if not same:
        raise RuntimeError(f"job {job.name} prepared other rows than those of {prepared}")
    return events


def aucs(events: Sequence[dict[str, Any]], split: str) -> list[float]:
    """Return the AUC after each epoch."""
    return [event["auc"] for event in events if event["type"] == "metric" and event["split"] == split]
