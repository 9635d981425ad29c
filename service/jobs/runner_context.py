"""State shared by the parts of the runner, and the id and the lock of its EVENKEEL_HOME."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from embeddings.durable_files import write_file
from embeddings.store import Store
from service.core import tables
from service.core.database import Database
from service.core.settings import Settings
from service.jobs.executors.base import Executor

log = logging.getLogger("evenkeel.runner")


@dataclass
class RunnerContext:
    """The runner's database, settings, store and executor; ``home_id`` is empty until it holds the lock."""

    database: Database
    settings: Settings
    store: Store
    executor: Executor
    home_id: str = ""

    def run_dir(self, job_id: str) -> Path:
        return self.settings.run_dir(job_id)


class BackgroundTasks:
    """At most one task for each job; a failure is logged, and the next round starts the task again.

    ``failure`` is the log message about a task that failed, such as ``could not be ended``.
    """

    def __init__(self, failure: str):
        self._failure = failure
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._tasks

    def start(self, job_id: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Start the work, unless the job's task is still running."""
        if job_id not in self._tasks:
            self._tasks[job_id] = task = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._done(job_id, done))

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _done(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(job_id, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("job %s %s; it is tried again", job_id, self._failure, exc_info=task.exception())


class HomeLock:
    """The lock on ``runner.lock``, which one runner at a time holds; the kernel releases it when the process dies."""

    def __init__(self, home: Path):
        self._home = home
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock, which this object does not hold yet, if it is free; return True if it was."""
        descriptor = os.open(self._home / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_home_id(home: Path) -> str | None:
    """Return the id of EVENKEEL_HOME; None if no job has run under it."""
    try:
        return (home / "home.id").read_text("ascii").strip()
    except FileNotFoundError:
        return None


def home_id(home: Path) -> str:
    """Return the id of EVENKEEL_HOME, created if needed; it stays the same wherever the directory is mounted."""
    identifier = read_home_id(home)
    if identifier is None:
        identifier = tables.new_id("home")
        write_file(home / "home.id", f"{identifier}\n".encode())
    return identifier
