"""What a task of a preparation is, what it works with on its host, and what runs tasks. Torch-free."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.data.errors import DataError
from trainer.data.prepare.fingerprint import files_of
from trainer.data.prepare.plan import DataPlan, make_plan
from trainer.data.prepare.workers import Workers
from trainer.spec import parse_dataset, parse_job
from trainer.storage.base import NotWholeError
from trainer.storage.cache import cache_of_host
from trainer.storage.folders import Folders
from trainer.storage.storage_registry import open_storage

STATE = "state.json"
PARTS = "parts"
"""Folder of the results of tasks in a run's storage."""


class Setting(NamedTuple):
    """What all tasks of a preparation have in common."""

    dataset: str
    """The specs, as JSON."""
    job: str
    files: str
    """Identity of the files of the rows, as JSON: another host must find the same."""
    storage: str
    prefix: str
    """Prefix of the results in the storage."""
    threads: int
    """Threads of each task."""
    text_tables: tuple[str, ...] = ()
    """Tables whose ids are text, also where the rows have integers."""

    def folders(self) -> Folders:
        return Folders(open_storage(self.storage), self.prefix)


class Task(NamedTuple):
    """A piece of work: its result is a folder of its name in the storage."""

    stage: str
    number: int
    arguments: Any = None
    """Small ones are JSON's types; a warm start's ids are Arrow's."""

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.number:05d}"


class TaskRunner(Protocol):
    """Runs tasks on hosts."""

    def run(self, tasks: Sequence[Task], done: Callable[[Task], None]) -> None:
        """Perform tasks, in any order, and call ``done`` after each.

        Raises:
            DataError: of the first of the tasks, in their order, that raised one.
            Exception: another error of a task, or there is no host any more.
        """


class Hosts(Protocol):
    """Where tasks may run, and the storage that those hosts share."""

    storage: str
    threads: int
    """Threads of each task."""

    def runner(self, setting: Setting, log: Callable[[str], Any]) -> AbstractContextManager[TaskRunner | None]:
        """Return a context with the runner of tasks; None in it where one host would do them all."""


@dataclass(frozen=True)
class Desk:
    """What a task works with on its host."""

    plan: DataPlan
    folders: Folders
    directory: Path
    """Its own, which is removed afterwards."""
    workers: Workers

    def fetch(self, name: str, only: Sequence[str] | None = None) -> Path:
        """Return a directory of this host with the result of a task, or with some files of it, to be read alone.

        Raises:
            NotWholeError: it is damaged; it is removed, so that another attempt makes it again.
            StorageError: the storage is away.
        """
        to = self.directory / name
        cache = cache_of_host()
        try:
            folder = self.folders.read(name)
            for path in folder.files if only is None else only:
                (to / path).parent.mkdir(parents=True, exist_ok=True)
                if not (to / path).exists():
                    self.folders.fetch(folder, path, to / path, cache)
        except NotWholeError:
            self.folders.remove(name)
            raise
        return to

    def state(self, name: str) -> dict[str, Any]:
        """Return the counts of a task."""
        state: dict[str, Any] = json.loads((self.fetch(name, [STATE]) / STATE).read_text("utf-8"))
        return state


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state), "utf-8")


def planned(setting: Setting) -> DataPlan:
    """Return the plan, made once in a process.

    Raises:
        DataError: this host sees other files than the one that has begun.
    """
    plan = _planned(setting.dataset, setting.job, setting.files)
    return plan.with_text(setting.text_tables)


@functools.lru_cache(maxsize=1)
def _planned(dataset: str, job: str, files: str) -> DataPlan:
    plan = make_plan(parse_dataset(json.loads(dataset)), parse_job(json.loads(job)))
    if json.dumps(files_of(plan)) != files:
        raise DataError(
            "this host sees other files than the host that has begun, by name, size or time of change",
            where=plan.source.uri,
            remedy="let all hosts mount the same directory, or put the rows into object storage",
        )
    return plan
