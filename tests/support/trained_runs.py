"""Runs that are trained once in a session, for tests about what comes after training: each gets a copy of its own.

What identifies a run is all that run.json says but for the places of files, and which file its rows are. Its copy is
the test's to change or damage: prepared data and checkpoints are files that nothing but a damaging test ever writes to,
and small, so that a copy costs what a hard link would and cannot reach another test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import RUN_FILE, Run, read_run, write_run
from trainer.spec import DatasetSpec, JobSpec


def lead(directory: Path) -> int:
    """The run from start to end; for a process of its own."""
    return execute(read_run(directory), start_ranks)


class TrainedRuns:
    """Keeps what it has trained below ``folder``."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._kept: dict[str, Path] = {}

    def finish(self, run: Run) -> Run:
        """``run``, just written, as it is after training and publishing with success."""
        assert run.init_checkpoint is None, "a run with a parent is trained by its own test"
        identity = _identity(run)
        if identity not in self._kept:
            self._kept[identity] = self._train(run)
        kept = self._kept[identity]
        for path in (kept / "run").iterdir():
            if path.name != RUN_FILE:
                _copy(path, run.directory / path.name)
        if (kept / "store").exists():
            _copy(kept / "store", Path(run.store_url))
        return read_run(run.directory)

    def _train(self, run: Run) -> Path:
        place = self._folder / f"{len(self._kept)}-{run.run_id}"
        written = write_run(
            place / "run", run_id=run.run_id, job=run.job, dataset=run.dataset, store_url=str(place / "store")
        )
        assert execute(read_run(written), start_ranks) == 0
        return place


def _identity(run: Run) -> str:
    document = json.loads((run.directory / RUN_FILE).read_text("utf-8"))
    rows = Path(run.dataset.uri).stat()
    return json.dumps([document | {"store_url": None}, rows.st_ino, rows.st_mtime_ns, rows.st_size], sort_keys=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def run_of(folder: Path, name: str, job: JobSpec, dataset: DatasetSpec, **places: Any) -> Run:
    """Write a run of its own below ``folder``, beside whose directories its store lies."""
    return read_run(
        write_run(folder / name, run_id=name, job=job, dataset=dataset, store_url=str(folder / "store"), **places)
    )
