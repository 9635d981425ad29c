"""Tasks of a distributed preparation, the folders that they work in, and the interface of task runners. Torch-free."""

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
    """Settings shared by all tasks of a preparation."""

    dataset: str
    """Dataset spec as JSON; ``job`` is the job spec, also as JSON."""
    job: str
    files: str
    """Identity of the files of the rows, as JSON: every host must see the same files."""
    storage: str
    prefix: str
    """Prefix of the results in the storage."""
    threads: int
    """Threads of each task."""
    text_tables: tuple[str, ...] = ()
    """Tables whose ids are text, even if the rows have integers."""

    def folders(self) -> Folders:
        return Folders(open_storage(self.storage), self.prefix)


class Task(NamedTuple):
    """A unit of work, whose result is a folder of its name in the storage."""

    stage: str
    number: int
    arguments: Any = None
    """Small arguments have types of JSON; ids of a warm start have types of Arrow."""

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.number:05d}"


class TaskRunner(Protocol):
    """Runs tasks on hosts."""

    def run(self, tasks: Sequence[Task], done: Callable[[Task], None]) -> None:
        """Perform tasks, in any order, and call ``done`` after each.

        Raises:
            DataError: the error of the first task, in their order, that raised one.
            Exception: a task failed otherwise, or no host is left.
        """


class Hosts(Protocol):
    """Hosts on which tasks may run, and the storage that they share."""

    storage: str
    threads: int
    """Threads of each task."""

    def runner(self, setting: Setting, log: Callable[[str], Any]) -> AbstractContextManager[TaskRunner | None]:
        """Return a context with the runner of tasks, or with None if one host would run all tasks."""


@dataclass(frozen=True)
class Desk:
    """Plan, result folders, own directory and threads of a task on its host."""

    plan: DataPlan
    folders: Folders
    directory: Path
    """The task's own directory, which is removed afterwards."""
    workers: Workers

    def fetch(self, name: str, only: Sequence[str] | None = None) -> Path:
        """Return a read-only directory of this host with the result of a task, or with some of its files.

        Raises:
            NotWholeError: the result is damaged; it is removed, so that another attempt makes it again.
            StorageError: the storage cannot be reached.
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
        return json.loads((self.fetch(name, [STATE]) / STATE).read_text("utf-8"))


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state), "utf-8")


def planned(setting: Setting) -> DataPlan:
    """Return the plan, made once in a process.

    Raises:
        DataError: this host sees other files than the host that began the preparation.
    """
    plan = _planned(setting.dataset, setting.job, setting.files)
    return plan.with_text(setting.text_tables)


@functools.lru_cache(maxsize=1)
def _planned(dataset: str, job: str, files: str) -> DataPlan:
    plan = make_plan(parse_dataset(json.loads(dataset)), parse_job(json.loads(job)))
    if json.dumps(files_of(plan)) != files:
        raise DataError(
            "this host sees other files (name, size or modification time) than the host that began the preparation",
            where=plan.source.uri,
            remedy="let all hosts mount the same directory, or put the rows into object storage",
        )
    return plan
