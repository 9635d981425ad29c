"""The trials of a recipe, one by one or in processes of their own: what has ended stays, what was killed goes on."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.papers.trials.run_trial import read_record, run_trial
from benchmarks.papers.trials.trial import AnyTrial

Record = dict[str, Any]


def run_grid(trials: Sequence[AnyTrial], out: Path, *, here: bool, workers: int, command: str) -> list[Record]:
    """Run what has not ended well yet and return the records of all, in order.

    A trial that fails is recorded and stops nothing; the same command again tries it again. ``here``: in this process,
    on its main thread, one by one; else ``workers`` at a time, in processes of their own.

    Raises:
        Stopped: it is asked to stop.
        ValueError: another grid has these results.
    """
    with _alone(out):
        return _run(trials, out, here, workers, command)


def _run(trials: Sequence[AnyTrial], out: Path, here: bool, workers: int, command: str) -> list[Record]:
    known = {trial.key: read_record(trial, out) for trial in trials}
    left = [trial for trial in trials if (known[trial.key] or {}).get("state") != "done"]
    if left:
        done = len(trials) - len(left)
        with tqdm(total=len(trials), initial=done, desc="trials", unit="trial", disable=not sys.stderr.isatty()) as bar:
            for record in _records(left, out, here, workers, command):
                known[record["key"]] = record
                bar.update()
                tqdm.write(_line(record), file=sys.stdout)
                sys.stdout.flush()
    return [ended for trial in trials if (ended := known[trial.key]) is not None]


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep another grid out, as two would train the same trials."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "grid.lock", "w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out}: another command trains these: wait for it, or give another --out") from None
        yield


def _records(trials: Sequence[AnyTrial], out: Path, here: bool, workers: int, command: str) -> Iterable[Record]:
    if here:
        return (run_trial(trial, out, command) for trial in trials)
    from benchmarks.papers.trials.processes import run_in_processes

    return run_in_processes(trials, out, workers, command)


def _line(record: Record) -> str:
    if record["state"] != "done":
        return f"{record['name']}: failed: {record['error']}"
    test = [metrics for metrics in record["metrics"] if metrics["split"] == "test"]
    last = test[-1] if test else {}
    shown = {name: value for name, value in last.items() if isinstance(value, float) and "bucket" not in name}
    figures = "  ".join(f"{name} {value:.4f}" for name, value in list(shown.items())[:4])
    return f"{record['name']}: {figures}  ({record['seconds']:.0f} s)"
