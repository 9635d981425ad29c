"""The background task that makes queued jobs run: claims, launches, follows, ends, and finds them after a restart.

One runner is active per EVENKEEL_HOME: whoever holds the lock on ``runner.lock``, which the kernel takes back when its
process dies. The runs are processes of their own and outlive it; what a run did while nobody looked stands in its event
file. Each round is a few short steps that may be cut anywhere (kill -9) and done again: the offset into the event file
moves in the transaction that applies the events, and the job's row says how far its launch had come.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.store import Store
from service import jobs, run_events, submission, tables
from service.database import Database
from service.errors import Problem
from service.pulse import Pulse
from service.settings import Settings
from service.states import ACTIVE, TERMINAL, backoff_seconds
from trainer.rundir import RUN_FILE

log = logging.getLogger("evenkeel.runner")

LINGER_SECONDS = 20.0
"""How long a run that reported its end may take to leave before its processes are ended."""
SILENT_SECONDS = 300.0
"""Runs send a heartbeat every few seconds; one that is stopped, or hangs before its first, sends none."""
STANDBY = "standby: another process runs the jobs of this EVENKEEL_HOME"


class Executor(Protocol):
    """How runs are started and watched: :mod:`trainer.launch`, or a stand-in with a smaller process in tests."""

    def launch(self, run_dir: Path, /) -> int: ...
    def is_alive(self, run_dir: Path, /) -> bool: ...
    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool: ...


class Runner:
    """``await run()`` until cancelled; ``round()`` is one pass, for tests."""

    def __init__(self, database: Database, settings: Settings, store: Store, executor: Executor):
        self._database = database
        self._settings = settings
        self._store = store
        self._executor = executor
        self._home_id = ""
        self._lock: int | None = None
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._lingering: dict[str, float] = {}

    async def run(self, pulse: Pulse, on_error: Callable[[], None] = lambda: None) -> None:
        """Rounds until cancelled. A failed round (database down, disk full) is tried again; ``pulse`` tells of it."""
        try:
            while True:
                try:
                    if self.acquire():
                        await self.round()
                        pulse.good()
                    else:
                        pulse.good(STANDBY)
                except Exception as error:
                    on_error()
                    pulse.failed(error)
                    await asyncio.sleep(1)
                await asyncio.sleep(self._settings.follow_seconds)
        finally:
            self.close()

    def acquire(self) -> bool:
        """Whether this is the active runner of its home; takes the lock where it is free."""
        if self._lock is not None:
            return True
        descriptor = os.open(self._settings.home / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        self._home_id = _home_id(self._settings.home)
        for left in self._settings.runs.glob(f"{jobs.DELETED}*"):
            shutil.rmtree(left, ignore_errors=True)
        return True

    def close(self) -> None:
        for task in self._ending.values():
            task.cancel()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def round(self) -> None:
        """Every job that is ours, one step on; then the next of the queue."""
        async with self._database.read() as connection:
            job = tables.job
            mine = sa.select(job).where(job.c.home_id == self._home_id, job.c.released.is_(False)).order_by(job.c.id)
            rows = [dict(row) for row in (await connection.execute(mine)).mappings()]
        failures = []
        for row in rows:
            try:
                await self._step(row)
            except Exception as failure:  # one run that cannot be looked after must not leave the others alone
                failures.append(failure)
        await self._claim()
        if failures:
            raise failures[0]

    async def _step(self, row: dict[str, Any]) -> None:
        """What this row's state asks for."""
        state = row["state"]
        if row["id"] in self._ending:
            await self._follow(row, alive=True)
        elif state not in ACTIVE:
            await self._release(row)
        elif state == "cancelling":
            self._end(row)
        elif row["launched_at"] is None:
            await self._launch(row)
        else:
            alive = await asyncio.to_thread(self._executor.is_alive, self._dir(row))
            await self._follow(row, alive)

    def _dir(self, row: dict[str, Any]) -> Path:
        return self._settings.run_dir(row["id"])

    async def _claim(self) -> None:
        """Takes the oldest queued job that is due, unless a run of this home has not gone yet; says why others wait."""
        job = tables.job.c
        now = tables.now()
        waiting = sa.select(tables.job).where(job.state == "queued").order_by(job.id)
        async with self._database.read() as connection:
            if await connection.scalar(sa.select(sa.func.count()).where(job.state == "queued")) == 0:
                return
        async with self._database.write() as connection:
            busy = await connection.scalar(
                sa.select(job.id).where(job.home_id == self._home_id, job.released.is_(False)).limit(1)
            )
            if busy is None:
                # What lies further ahead than any backoff was reckoned by a clock that has been set back since.
                longest = datetime.timedelta(seconds=backoff_seconds(99, self._settings.retry_backoff_seconds))
                due = sa.or_(job.not_before.is_(None), job.not_before <= now, job.not_before > now + longest)
                # A job that ran here before has its checkpoints here.
                ours = sa.or_(job.home_id.is_(None), job.home_id == self._home_id)
                query = waiting.where(due, ours).limit(1).with_for_update(skip_locked=True)
                row = (await connection.execute(query)).mappings().first()
                if row is not None:
                    await self._take(connection, dict(row), now)
                    busy = row["id"]
            if busy is not None:
                reason = f"waiting for {busy}: one local run at a time"
                others = sa.and_(job.state == "queued", job.not_before.is_(None), job.reason.is_distinct_from(reason))
                await connection.execute(tables.job.update().where(others).values(reason=reason))

    async def _take(self, connection: AsyncConnection, row: dict[str, Any], now: Any) -> None:
        attempt = row["attempt"] + 1
        # In run.json too: an attempt that was given up finds another token there and publishes nothing.
        claimed: dict[str, Any] = {
            "home_id": self._home_id,
            "lease": secrets.token_hex(16),
            "released": False,
            "launched_at": None,
            "heartbeat_at": None,
        }
        claimed |= {"started_at": row["started_at"] or now, "error": None, "publication": None}
        row["attempt"] = attempt
        await jobs.move(connection, row, "claimed", attempt=attempt, reason=None, not_before=None, **claimed)

    async def _launch(self, row: dict[str, Any]) -> None:
        """Starts the attempt. Cut between launch and commit, the next round finds the process alive and adopts it."""
        directory = self._dir(row)
        error, retryable = None, False
        values: dict[str, Any] = {"launched_at": tables.now(), "heartbeat_at": tables.now()}
        try:
            if not (directory.exists() and await asyncio.to_thread(self._executor.is_alive, directory)):
                if directory.exists():
                    await asyncio.to_thread(self._executor.terminate, directory, grace_seconds=0)
                await asyncio.to_thread(submission.prepare_run, self._settings, self._store, row)
                await asyncio.to_thread(self._executor.launch, directory)
            values["parent_version"] = json.loads((directory / RUN_FILE).read_text("utf-8"))["parent_version"]
        except Problem as problem:
            error = submission.problem_error(problem)
        except (OSError, RuntimeError, ValueError) as failure:
            log.exception("job %s could not be launched", row["id"])
            remedy = "see the service's log; 'evenkeel doctor' checks disk and memory"
            error, retryable = {"code": "launch-failed", "message": str(failure), "remedy": remedy}, True
        async with self._database.write() as connection:
            current = await jobs.locked(connection, row["id"])
            if error is None:
                await jobs.change(connection, current, **values)
            else:
                await run_events.fail(connection, current, error, retryable, self._settings.retry_backoff_seconds)

    async def _follow(self, row: dict[str, Any], alive: bool) -> None:
        """Applies the events written since; and where the run is gone without its last word, says so."""
        directory = self._dir(row)
        if alive and run_events.size(directory) == row["events_offset"]:
            await self._warn_of_silence(row)
            return
        async with self._database.write() as connection:
            current = await jobs.locked(connection, row["id"])
            more = await run_events.apply(connection, current, directory, alive, self._settings.retry_backoff_seconds)
            if not alive and not more and current["state"] in ACTIVE:
                await run_events.died(connection, current, directory, self._settings.retry_backoff_seconds)

    async def _warn_of_silence(self, row: dict[str, Any]) -> None:
        """A run that lives and says nothing keeps its place: what to do about it is for people to decide."""
        if row["reason"] is not None or row["heartbeat_at"] is None or row["state"] == "cancelling":
            return
        silent = (tables.now() - row["heartbeat_at"]).total_seconds()
        if silent < SILENT_SECONDS:
            return
        async with self._database.write() as connection:
            current = await jobs.locked(connection, row["id"])
            if current["state"] in ACTIVE and current["heartbeat_at"] == row["heartbeat_at"]:
                reason = f"no sign of life since {row['heartbeat_at']:%Y-%m-%d %H:%M} UTC: see its log, or cancel it"
                await jobs.change(connection, current, reason=reason)
                log.warning("job %s: %s", row["id"], reason)

    def _end(self, row: dict[str, Any]) -> None:
        """Ends a run in the background: its grace must not hold up the others."""
        task = asyncio.create_task(self._terminate(row))
        self._ending[row["id"]] = task
        task.add_done_callback(lambda done: self._ended(row["id"], done))

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._ending.pop(job_id, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("job %s could not be ended; it is tried again", job_id, exc_info=task.exception())

    async def _terminate(self, row: dict[str, Any]) -> None:
        directory = self._dir(row)
        # A directory that someone removed says nothing of its processes: they carry its name.
        if directory.exists() or row["launched_at"] is not None:
            await in_daemon_thread(
                lambda: self._executor.terminate(directory, grace_seconds=self._settings.cancel_grace_seconds)
            )
        async with self._database.write() as connection:
            current = await jobs.locked(connection, row["id"])
            while await run_events.apply(connection, current, directory, False, self._settings.retry_backoff_seconds):
                pass
            if current["state"] == "cancelling":
                await jobs.move(connection, current, "cancelled")

    async def _release(self, row: dict[str, Any]) -> None:
        """Once an ended attempt has left, or has had the time to, ends what is left of it and frees the place."""
        directory = self._dir(row)
        ended = self._lingering.setdefault(row["id"], time.monotonic())
        alive = await asyncio.to_thread(self._executor.is_alive, directory)
        if alive and row["state"] in TERMINAL and time.monotonic() - ended < LINGER_SECONDS:
            return
        await asyncio.to_thread(self._executor.terminate, directory, grace_seconds=0)
        async with self._database.write() as connection:
            current = await jobs.locked(connection, row["id"])
            # Ranks outlive a killed driver for a moment: their last metrics belong to this attempt, and the next one
            # goes on from the checkpoint that they wrote.
            while await run_events.apply(connection, current, directory, False, self._settings.retry_backoff_seconds):
                pass
            if current["state"] not in ACTIVE:
                await jobs.change(connection, current, released=True)
        self._lingering.pop(row["id"], None)


async def in_daemon_thread(function: Callable[[], Any]) -> None:
    """Like asyncio.to_thread, but the service's end does not wait for it: a grace of a minute must not hold up a
    restart, after which the cancel is carried on with."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def work() -> None:
        error = None
        try:
            function()
        except Exception as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is gone: so is everyone who waited
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, daemon=True).start()
    await done


def _home_id(home: Path) -> str:
    """A name that the directory keeps, wherever it is mounted and whatever the host is called."""
    path = home / "home.id"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text("ascii").strip()
    scratch = path.with_name(f".home.id.{os.getpid()}")
    scratch.write_text(tables.new_id("home") + "\n", "ascii")
    os.replace(scratch, path)
    return path.read_text("ascii").strip()
