"""Ours, as users run it: a job of ``trainer.launch.in_process``, which ``evenkeel train`` calls.

Its figures are taken from its own events.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.batches.prepared import PreparedData
from trainer.launch.in_process import train
from trainer.launch.on_host import leave
from trainer.runs.events import read_events
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

WARM_SECONDS = 4.0
"""Start of a job's progress that is not timed: it includes compilation and the first touches of all memory."""


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


def rate(events: Sequence[dict[str, Any]]) -> float:
    """Return examples a second from a job's progress events, over the windows after the first ``WARM_SECONDS``."""
    progress = [event for event in events if event["type"] == "progress"]
    examples = np.diff([0, *(event["examples"] for event in progress)])
    seconds = examples / np.array([event["examples_per_second"] for event in progress])
    warm = np.cumsum(seconds) - seconds >= WARM_SECONDS
    if not warm.any():
        raise ValueError(f"the job was over within {WARM_SECONDS:g} seconds: give it more rows (--rows)")
    return float(examples[warm].sum() / seconds[warm].sum())


def specs_to_json(dataset: DatasetSpec, job: JobSpec, folder: Path, prepared: Path) -> str:
    return json.dumps({
        "dataset": dataset.model_dump(mode="json"), "job": job.model_dump(mode="json"), "folder": str(folder),
        "prepared": str(prepared),
    })  # fmt: skip


def main(text: str) -> None:
    """Run in a process of its own: specs as JSON in, one line of JSON out."""
    asked = json.loads(text)
    dataset, job = parse_dataset(asked["dataset"]), parse_job(asked["job"])
    events = events_of(dataset, job, Path(asked["folder"]), Path(asked["prepared"]))
    print(json.dumps({"examples_per_second": rate(events)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
