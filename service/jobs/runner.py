"""The background task that runs queued jobs: claims, launches, follows and ends them, and finds them after a restart.

One runner is active per EVENKEEL_HOME: the process that holds the lock on ``runner.lock``, which the kernel releases
when the process dies. The runs are processes of their own and outlive the runner; a run's event file records its
progress meanwhile. Each round is a few short steps that may be interrupted anywhere (kill -9) and repeated. The offset
into the event file moves in the transaction that applies the events, and the job's row shows how far its launch had
progressed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import sqlalchemy as sa

from embeddings.store import Store
from service.core import logs, tables
from service.core.database import Database
from service.core.errors import Problem
from service.core.rows import all_rows
from service.core.settings import Settings
from service.core.task_health import TaskHealth
from service.jobs import job_records, run_events, submission
from service.jobs.executors.base import Executor, ExecutorUnavailable
from service.jobs.follower import Follower
from service.jobs.job_queue import JobQueue
from service.jobs.job_row import JobRow
from service.jobs.reaper import Reaper
from service.jobs.runner_context import HomeLock, RunnerContext, home_id
from service.jobs.states import ACTIVE
from service.jobs.stored_runs import remove_run
from trainer.data.errors import DataAwayError
from trainer.runs.directory import RUN_FILE

log = logging.getLogger("evenkeel.runner")

STANDBY = "standby: another process runs the jobs of this EVENKEEL_HOME"


class Runner:
    """Runs queued jobs: ``await run()`` until cancelled; ``round()`` is one pass, for tests."""

    def __init__(self, database: Database, settings: Settings, store: Store, executor: Executor):
        self._context = RunnerContext(database, settings, store, executor)
        self._lock = HomeLock(settings.home)
        self._queue = JobQueue(self._context)
        self._follower = Follower(self._context)
        self._reaper = Reaper(self._context, self._follower)

    @property
    def home_id(self) -> str:
        """The id of EVENKEEL_HOME if this runner holds its lock, else an empty text."""
        return self._context.home_id

    async def run(self, health: TaskHealth) -> None:
        """Repeat rounds until cancelled.

        A failed round (database down, disk full) is tried again and reported to ``health``.
        """
        try:
            while True:
                try:
                    if self.acquire():
                        taken = await self.round()
                        health.good()
                        if taken:
                            continue  # the next round starts them at once
                    else:
                        health.good(STANDBY)
                except Exception as error:
                    health.failed(error)
                    await asyncio.sleep(1)
                await asyncio.sleep(self._context.settings.follow_seconds)
        finally:
            self.close()

    def acquire(self) -> bool:
        """Take the lock of EVENKEEL_HOME if it is free, and return True if this runner is the active runner."""
        if self._lock.held:
            return True
        if not self._lock.acquire():
            return False
        self._context.home_id = home_id(self._context.settings.home)
        for left in self._context.settings.runs.glob(f"{job_records.DELETED}*"):
            remove_run(left)
        return True

    def close(self) -> None:
        self._reaper.close()
        self._queue.close()
        self._lock.release()

    async def round(self) -> bool:
        """Advance each active job of EVENKEEL_HOME by a step, and claim queued jobs; return True if any was claimed."""
        async with self._context.database.read() as connection:
            job = tables.job
            ours = sa.and_(job.c.home_id == self._context.home_id, job.c.released.is_(False))
            rows = await all_rows(connection, JobRow, sa.select(job).where(ours).order_by(job.c.id))
        self._follower.begin_round({row["id"] for row in rows})
        failures = []
        for row in rows:
            try:
                await self._step(row)
            except Exception as failure:  # an error in one run must not keep the others from their step
                failures.append(failure)
        taken = False
        while await self._queue.claim():
            taken = True
        if failures:
            raise failures[0]
        return taken

    async def _step(self, row: JobRow) -> None:
        named = logs.job_id.set(row["id"])  # log lines of this step, and of tasks that it starts, have the job's id
        try:
            await self._look_after(row)
        except ExecutorUnavailable as error:
            await self._follower.wait_for_answer(row, error)
        except Exception as failure:
            failure.add_note(f"in the runner's step for job {row['id']}")  # the log line is written elsewhere
            raise
        else:
            if not self._reaper.is_ending(row["id"]):
                self._follower.answered(row["id"])
        finally:
            logs.job_id.reset(named)

    async def _look_after(self, row: JobRow) -> None:
        state = row["state"]
        if self._reaper.is_ending(row["id"]):
            await self._follower.apply(row, alive=True)
        elif state not in ACTIVE:
            await self._reaper.release(row)
        elif state == "cancelling":
            self._reaper.end(row)
        elif row["launched_at"] is None:
            await self._launch(row)
        else:
            alive = await asyncio.to_thread(self._context.executor.is_alive, self._context.run_dir(row["id"]))
            await self._follower.follow(row, alive)

    async def _launch(self, row: JobRow) -> None:
        """Start the attempt of a claimed job.

        If this is interrupted between launch and commit, the next round finds the attempt, alive or ended, and
        continues with it.
        """
        directory, settings = self._context.run_dir(row["id"]), self._context.settings
        error, retryable = None, False
        values: dict[str, Any] = {"launched_at": tables.now(), "heartbeat_at": tables.now()}
        try:
            ended = run_events.read_exit(directory, row["attempt"]) is not None
            alive = directory.exists() and await asyncio.to_thread(self._context.executor.is_alive, directory)
            if not (alive or ended):
                if directory.exists():
                    await asyncio.to_thread(self._context.executor.terminate, directory, grace_seconds=0)
                await asyncio.to_thread(submission.prepare_run, settings, self._context.store, row)
                await asyncio.to_thread(self._context.executor.launch, directory)
            values["parent_version"] = json.loads((directory / RUN_FILE).read_text("utf-8"))["parent_version"]
        except Problem as problem:
            error = {"code": problem.code, "message": problem.detail, "remedy": problem.remedy}
            retryable = isinstance(problem.__cause__, DataAwayError)
        except (OSError, RuntimeError, ValueError) as failure:
            log.exception("job %s could not be launched", row["id"])
            # Python's error names no file if a write fails on a full disk.
            of_no_file = isinstance(failure, OSError) and failure.filename is None
            message = f"{directory}: {failure}" if of_no_file else str(failure)
            remedy = "see the service's log; 'evenkeel doctor' checks disk and memory"
            error, retryable = {"code": "launch-failed", "message": message, "remedy": remedy}, True
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            if error is None:
                await job_records.change(connection, current, **values)
            else:
                await run_events.fail(connection, current, error, retryable, settings.retry_backoff_seconds)
