"""Run the trials of a recipe: trials that have ended are not run again, killed trials are resumed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.papers.trials.run_trial import RUNS, read_record, record_experiment, record_job
from benchmarks.papers.trials.trial import AnyTrial, TextTrial, Trial
from trainer.launch.worker import use_threads
from trainer.search.runs import Planned, alone, run_all

Record = dict[str, Any]


def run_grid(trials: Sequence[AnyTrial], out: Path, *, workers: int, command: str) -> list[Record]:
    """Run the trials that have not yet succeeded, jobs before texts, and return the records of all, in order.

    A trial that fails is recorded and does not stop the others; the same command tries it again. ``workers`` jobs train
    at a time, with one CPU each; measurements and trainings on texts run in this process, in turn.

    Raises:
        ValueError: another grid is using these results.
    """
    use_threads(1)  # as in the job's own run: float sums depend on the number of threads
    with alone(out):
        known = {trial.key: read_record(trial, out) for trial in trials}
        left = [trial for trial in trials if (known[trial.key] or {}).get("state") != "done"]
        bar = tqdm(total=len(trials), initial=len(trials) - len(left), desc="trials", unit="trial",
                   disable=not left or not sys.stderr.isatty())  # fmt: skip
        with bar:
            for record in _records(left, out, workers, command):
                known[record["key"]] = record
                bar.update()
                tqdm.write(_line(record), file=sys.stdout)
                sys.stdout.flush()
    return [ended for trial in trials if (ended := known[trial.key]) is not None]


def _records(trials: Sequence[AnyTrial], out: Path, workers: int, command: str) -> Iterator[Record]:
    jobs = {trial.key: trial for trial in trials if isinstance(trial, Trial)}
    planned = [Planned(key, trial.dataset, trial.job) for key, trial in jobs.items()]
    with contextlib.closing(run_all(planned, out / RUNS, workers)) as runs:
        for one, run in runs:
            yield record_job(jobs[one.name], run, out, command)
    for trial in trials:
        if isinstance(trial, TextTrial):
            yield record_experiment(trial, out, command)


def _line(record: Record) -> str:
    if record["state"] != "done":
        return f"{record['name']}: failed: {record['error']}"
    test = [metrics for metrics in record["metrics"] if metrics["split"] == "test"]
    last = test[-1] if test else {}
    shown = {name: value for name, value in last.items() if isinstance(value, float) and "bucket" not in name}
    figures = "  ".join(f"{name} {value:.4f}" for name, value in list(shown.items())[:4])
    return f"{record['name']}: {figures}  ({record['seconds']:.0f} s)"
