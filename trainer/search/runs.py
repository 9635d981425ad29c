"""Runs of trials: detached processes (trainer.runs.run_process), followed through the files of their directories.

If the run of a trial, or the command, was killed, the trial continues the run from its checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.runs import run_process
from trainer.runs.directory import RUN_FILE, read_run, write_run
from trainer.runs.events import read_events
from trainer.runs.protocol import EXIT_FILE, LOG_FILE
from trainer.runs.warm_pool import WarmPool
from trainer.spec import DatasetSpec, JobSpec

POLL_SECONDS = 0.2
LOCK_FILE = "grid.lock"
STOP_SECONDS = 30.0
"""Time for a run that is stopped to write its checkpoint."""


class TrialRun:
    """The run of a trial.

    Runs are forked from the warm pool, if any.
    """

    def __init__(self, path: Path, warm_pool: WarmPool | None = None):
        self.path, self._warm_pool = path, warm_pool

    @property
    def is_alive(self) -> bool:
        return run_process.is_alive(self.path)

    def begin(self, job: JobSpec, dataset: DatasetSpec, *, run_id: str, store_url: str) -> None:
        """Start or resume the run, unless it is training or has succeeded."""
        if self.is_alive or exit_of(self.path).get("state") == "succeeded":
            return
        self.path.mkdir(parents=True, exist_ok=True)
        again = (self.path / RUN_FILE).exists()
        attempt = read_run(self.path).attempt + 1 if again else 1
        write_run(self.path, run_id=run_id, attempt=attempt, job=job, dataset=dataset, store_url=store_url)
        (self.path / EXIT_FILE).unlink(missing_ok=True)
        run_process.launch(self.path, warm_pool=self._warm_pool)

    @property
    def error(self) -> str | None:
        """The reason why the run, which is over, has failed, and the remedy; None if it succeeded."""
        ended = exit_of(self.path)
        if ended.get("state") == "succeeded":
            return None
        error = ended.get("error", {})
        what = error.get("message") or f"its process has ended as {ended.get('state', 'one that was killed')}"
        return f"{what}. Remedy: {error.get('remedy') or f'see {self.path / LOG_FILE}'}"

    def end(self) -> None:
        """End the run if it still trains; it writes a checkpoint first."""
        if self.is_alive:
            run_process.terminate(self.path, STOP_SECONDS)


class Planned(NamedTuple):
    """A trial that has to run; ``name`` is the name of its run directory."""

    name: str
    dataset: DatasetSpec
    job: JobSpec


def run_all(trials: Sequence[Planned], folder: Path, workers: int = 1) -> Generator[tuple[Planned, TrialRun]]:
    """Train trials in run directories of ``folder``, ``workers`` at a time; yield each with its run once that is over.

    Runs that still train end with this generator.
    """
    warm_pool = WarmPool()
    waiting, running = list(reversed(trials)), list[tuple[Planned, TrialRun]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                trial, run = waiting[-1], TrialRun(folder / waiting.pop().name, warm_pool)
                running.append((trial, run))
                store_url = str(run.path / "store")
                run.begin(trial.job, trial.dataset, run_id=f"{folder.name}-{trial.name}", store_url=store_url)
            over = [one for one in running if not one[1].is_alive]
            for one in over:
                running.remove(one)
                yield one
            if not over:
                time.sleep(POLL_SECONDS)
    finally:
        for _, run in running:
            run.end()
        warm_pool.close()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock during the block, so that no other command trains the same trials.

    Raises:
        ValueError: another command holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_FILE, "w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another command trains these: wait for it, or give another --out") from None
        yield


def figures_of(run: Path, metric: str) -> Iterator[tuple[int, float | None]]:
    """Yield (epoch, validation value or None) in the order of a run's events; a repeated epoch is yielded again."""
    for event in read_events(run):
        if event.fields["type"] == "metric" and event.fields["split"] == "validation":
            yield event.fields["epoch"], event.fields.get(metric)


def exit_of(run: Path) -> dict[str, Any]:
    """Return the content of a run's exit.json; {} if the run has not ended."""
    try:
        document: dict[str, Any] = json.loads((run / EXIT_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return document
