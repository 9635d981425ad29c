"""The background task that runs queued jobs: claims, launches, follows and ends them, and finds them after a restart.

One runner is active per EVENKEEL_HOME: the process that holds the lock on ``runner.lock``, which the kernel releases
when the process dies. The runs are processes of their own and outlive it; what a run did meanwhile is in its event
file. Each round is a few short steps that may be interrupted anywhere (kill -9) and repeated: the offset into the event
file moves in the transaction that applies the events, and the job's row shows how far its launch had progressed.
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
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.durable_files import write_file
from embeddings.store import Store
from service.core import disk, logs, tables, thread_pools
from service.core.database import Database
from service.core.errors import Problem
from service.core.settings import Settings
from service.core.task_health import TaskHealth
from service.jobs import admission, job_records, resource_prediction, run_events, submission
from service.jobs.admission import ResourceRequest
from service.jobs.executors.base import Executor, ExecutorUnavailable
from service.jobs.liveness import Liveness, Looked
from service.jobs.states import ACTIVE, TERMINAL, backoff_seconds
from trainer.runs.directory import RUN_FILE, revoke

log = logging.getLogger("evenkeel.runner")

LINGER_SECONDS = 20.0
"""How long a run that reported its end may take to leave before its processes are ended."""
STANDBY = "standby: another process runs the jobs of this EVENKEEL_HOME"


class Runner:
    """Runs queued jobs: ``await run()`` until cancelled; ``round()`` is one pass, for tests."""

    def __init__(self, database: Database, settings: Settings, store: Store, executor: Executor):
        self._database = database
        self._settings = settings
        self._store = store
        self._executor = executor
        self._home_id = ""
        self._lock: int | None = None
        self._watch = Liveness(settings.silence_seconds)
        self._host = admission.host(settings)
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._counting: dict[str, asyncio.Task[None]] = {}
        self._lingering: dict[str, float] = {}
        self._unanswered: dict[str, tuple[datetime.datetime, float]] = {}

    async def run(self, pulse: TaskHealth, on_error: Callable[[], None] = lambda: None) -> None:
        """Repeat rounds until cancelled.

        A failed round (database down, disk full) is tried again and reported to ``pulse``.
        """
        try:
            while True:
                try:
                    if self.acquire():
                        taken = await self.round()
                        pulse.good()
                        if taken:
                            continue  # they are started at once
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
        """Take the home's lock if it is free, and return whether this runner is the active one."""
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
        for left in self._settings.runs.glob(f"{job_records.DELETED}*"):
            shutil.rmtree(left, ignore_errors=True)
        return True

    def close(self) -> None:
        for task in (*self._ending.values(), *self._counting.values()):
            task.cancel()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def round(self) -> bool:
        """Advance each of our jobs by one step, then claim queued jobs that fit; return whether any was claimed."""
        async with self._database.read() as connection:
            job = tables.job
            mine = sa.select(job).where(job.c.home_id == self._home_id, job.c.released.is_(False)).order_by(job.c.id)
            rows = [dict(row) for row in (await connection.execute(mine)).mappings()]
        if self._watch.begin_round({row["id"] for row in rows}):
            log.warning("this machine or this process was away: every run is given a whole interval to say something")
        failures = []
        for row in rows:
            try:
                await self._step(row)
            except Exception as failure:  # one run that cannot be looked after must not leave the others alone
                failures.append(failure)
        taken = False
        while await self._claim():
            taken = True
        if failures:
            raise failures[0]
        return taken

    async def _step(self, row: dict[str, Any]) -> None:
        named = logs.job_id.set(row["id"])  # what is logged on the way, in tasks begun here too, says whose it is
        try:
            await self._look_after(row)
        except ExecutorUnavailable as error:
            await self._wait_for_answer(row, error)
        except Exception as failure:
            failure.add_note(f"while job {row['id']} was looked after")  # it is logged elsewhere
            raise
        else:
            if row["id"] not in self._ending:
                self._unanswered.pop(row["id"], None)
        finally:
            logs.job_id.reset(named)

    async def _look_after(self, row: dict[str, Any]) -> None:
        """Take the step that the row's state requires."""
        state = row["state"]
        if row["id"] in self._ending:
            await self._apply(row, alive=True)
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

    async def _wait_for_answer(self, row: dict[str, Any], error: ExecutorUnavailable) -> None:
        """Keep a run whose state is unknown in its place, and apply what it reports itself.

        After a while the job shows why nothing else happens.
        """
        if row["state"] in ACTIVE and row["launched_at"] is not None:
            await self._follow(row, alive=True)
        since, asked = self._unanswered.setdefault(row["id"], (tables.now(), time.monotonic()))
        if time.monotonic() - asked < self._settings.unanswered_seconds:
            return
        reason = f"its executor has not answered since {since:%Y-%m-%d %H:%M} UTC, and is asked again: {error}"
        async with self._database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            same = (current["state"], current["attempt"]) == (row["state"], row["attempt"])
            if same and current["state"] not in TERMINAL and current["reason"] != reason:
                log.warning("job %s: %s", row["id"], reason)
                await job_records.change(connection, current, reason=reason)

    async def _claim(self) -> bool:
        """Take the first job in the queue if there is room for it, else record why it and the others wait.

        Jobs may only pass one that waits for a backoff to elapse or for its last attempt to be gone: a large job gets
        its room in the end, however many small ones come after it.

        Returns:
            True if there may be room for one more.
        """
        job = tables.job.c
        now = tables.now()
        # What lies further ahead than any backoff was reckoned by a clock that has been set back since.
        longest = datetime.timedelta(seconds=backoff_seconds(99, self._settings.retry_backoff_seconds))
        due = sa.or_(job.not_before.is_(None), job.not_before <= now, job.not_before > now + longest)
        # A job that ran here before has its checkpoints here.
        ours = sa.or_(job.home_id.is_(None), job.home_id == self._home_id)
        waiting = sa.and_(job.state == "queued", due, ours, job.released.is_(True))
        mine = sa.select(job.id, job.tenant, job.needs).where(job.home_id == self._home_id, job.released.is_(False))
        async with self._database.read() as connection:
            head = (
                (await connection.execute(sa.select(tables.job).where(waiting).order_by(job.id).limit(1)))
                .mappings()
                .first()
            )
            if head is None:
                return False
            held = {
                row.id if row.tenant == head["tenant"] else f"another tenant's run ({number})": ResourceRequest(
                    **row.needs
                )
                for number, row in enumerate(await connection.execute(mine), 1)
                if row.needs
            }
        if head["needs"] is None:
            self._count(dict(head))
            reason: str | None = "the rows of its dataset are counted, to know the memory that it needs"
        else:
            reason = await self._obstacle(ResourceRequest(**head["needs"]), held)
        if reason is not None:
            await self._explain(dict(head), reason, waiting)
            return False
        async with self._database.write() as connection:
            query = sa.select(tables.job).where(waiting, job.id == head["id"]).with_for_update(skip_locked=True)
            row = (await connection.execute(query)).mappings().first()
            if row is not None:
                await self._take(connection, dict(row), now)
        return row is not None

    async def _obstacle(self, needs: ResourceRequest, held: dict[str, ResourceRequest]) -> str | None:
        shortage = disk.shortage(self._settings)
        if shortage is not None:
            return shortage
        if self._settings.ray_address is None:
            return admission.obstacle(needs, self._host, held, self._settings.max_runs)
        ask = getattr(self._executor, "room", None)
        try:
            nodes = None if ask is None else await asyncio.to_thread(ask)
        except ExecutorUnavailable as error:
            return str(error)
        return admission.cluster_obstacle(needs, nodes, held, self._settings.max_runs)

    async def _explain(self, head: dict[str, Any], reason: str, waiting: sa.ColumnElement[bool]) -> None:
        """Record why each waiting job waits, if it changed; tenants learn nothing of each other's jobs."""
        job = tables.job.c
        told = sa.case(
            (job.id == head["id"], reason),
            (job.tenant == head["tenant"], admission.behind(head["id"], reason)),
            else_=admission.BEHIND_ANOTHER_TENANT,
        )
        untold = sa.and_(waiting, job.reason.is_distinct_from(told))
        async with self._database.read() as connection:
            if await connection.scalar(sa.select(job.id).where(untold).limit(1)) is None:
                return
        async with self._database.write() as connection:
            await connection.execute(tables.job.update().where(untold).values(reason=told))

    def _count(self, row: dict[str, Any]) -> None:
        """Predict in the background what a job needs: the queue waits for it, but existing runs do not."""
        if row["id"] not in self._counting:
            task = asyncio.create_task(self._counted(row))
            self._counting[row["id"]] = task
            task.add_done_callback(lambda done: self._done(self._counting, row["id"], done))

    async def _counted(self, row: dict[str, Any]) -> None:
        logs.job_id.set(row["id"])
        try:
            needs = await thread_pools.in_thread(resource_prediction.of_row, self._settings, row)
        except ValueError as failure:
            await self._refuse_unreadable(row["id"], failure)
            return
        problem = None if self._settings.ray_address else admission.impossible(needs, self._host)
        async with self._database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            if current["state"] != "queued":
                return
            await job_records.change(connection, current, needs=needs.document())
            if problem is not None:
                error = {"code": "does-not-fit", "message": problem[0], "remedy": problem[1]}
                await self._take(connection, current, tables.now())
                await run_events.fail(connection, current, error, False, self._settings.retry_backoff_seconds)

    async def _refuse_unreadable(self, job_id: str, failure: ValueError) -> None:
        """End a job whose spec this version can no longer read: as the first in the queue, it would block it."""
        log.error("job %s: its spec cannot be read", job_id, exc_info=failure)
        remedy = "submit it again in the form that this version reads"
        error = {"code": "spec-unreadable", "message": str(failure).splitlines()[0], "remedy": remedy}
        async with self._database.write() as connection:
            current = await job_records.locked(connection, job_id)
            if current["state"] == "queued":
                await self._take(connection, current, tables.now())
                await run_events.fail(connection, current, error, False, self._settings.retry_backoff_seconds)

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
        await job_records.move(connection, row, "claimed", attempt=attempt, reason=None, not_before=None, **claimed)

    async def _launch(self, row: dict[str, Any]) -> None:
        """Start the attempt.

        If this is interrupted between launch and commit, the next round finds the attempt alive, or ended, and adopts
        it.
        """
        directory = self._dir(row)
        error, retryable = None, False
        values: dict[str, Any] = {"launched_at": tables.now(), "heartbeat_at": tables.now()}
        try:
            ended = run_events.read_exit(directory, row["attempt"]) is not None
            alive = directory.exists() and await asyncio.to_thread(self._executor.is_alive, directory)
            if not (alive or ended):
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
            current = await job_records.locked(connection, row["id"])
            if error is None:
                await job_records.change(connection, current, **values)
            else:
                await run_events.fail(connection, current, error, retryable, self._settings.retry_backoff_seconds)

    async def _follow(self, row: dict[str, Any], alive: bool) -> None:
        """Apply the run's new events, and end its attempt if necessary.

        That is the case if the run is gone without reporting its end, has been silent for too long, or has exceeded its
        time limit.
        """
        said = run_events.size(self._dir(row))
        if not alive or said != row["events_offset"]:
            await self._apply(row, alive)
        if not alive:
            return
        age = (tables.now() - row["launched_at"]).total_seconds()
        looked = self._watch.look(row["id"], (row["attempt"], row["lease"]), said, age)
        limit = row["spec"]["resources"]["timeout_seconds"]
        if limit is not None and looked.running_seconds > limit + self._settings.cancel_grace_seconds:
            await self._give_up(row, said, run_events.timed_out(limit), retryable=False)
        elif looked.silent_seconds > self._settings.silence_seconds:
            await self._give_up(row, said, run_events.silent(looked.silent_seconds), retryable=True)
        elif looked.silent_seconds > self._settings.silence_seconds / 2:
            await self._warn_of_silence(row, looked)

    async def _apply(self, row: dict[str, Any], alive: bool) -> None:
        directory = self._dir(row)
        async with self._database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            more = await run_events.apply(connection, current, directory, alive, self._settings.retry_backoff_seconds)
            if not alive and not more and current["state"] in ACTIVE:
                await run_events.died(connection, current, directory, self._settings.retry_backoff_seconds)

    async def _give_up(self, row: dict[str, Any], said: int, error: dict[str, str], retryable: bool) -> None:
        """End an attempt that does not end itself.

        It loses its lease first, here and (before any signal, in ``_release``) in its run directory: should it wake up
        meanwhile, it cannot write anything any more.
        """
        async with self._database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            moved = (current["attempt"], current["lease"]) != (row["attempt"], row["lease"])
            if moved or current["state"] not in ACTIVE or run_events.size(self._dir(row)) != said:
                return
            log.warning("job %s, attempt %d: %s", row["id"], row["attempt"], error["message"])
            await job_records.change(connection, current, lease=None)
            await run_events.fail(connection, current, error, retryable, self._settings.retry_backoff_seconds)

    async def _warn_of_silence(self, row: dict[str, Any], looked: Looked) -> None:
        if row["reason"] is not None:
            return
        async with self._database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            if current["state"] in ACTIVE and current["attempt"] == row["attempt"] and current["reason"] is None:
                limit = self._settings.silence_seconds
                reason = f"no sign of life for {looked.silent_seconds:.0f} s: it is given up after {limit:g} s"
                await job_records.change(connection, current, reason=reason)

    def _end(self, row: dict[str, Any]) -> None:
        """End a run in the background, so that its grace period does not delay the others."""
        task = asyncio.create_task(self._terminate(row))
        self._ending[row["id"]] = task
        task.add_done_callback(lambda done: self._done(self._ending, row["id"], done))

    def _done(self, tasks: dict[str, asyncio.Task[None]], job_id: str, task: asyncio.Task[None]) -> None:
        tasks.pop(job_id, None)
        if not task.cancelled() and task.exception() is not None:
            what = "ended" if tasks is self._ending else "counted"
            log.error("job %s could not be %s; it is tried again", job_id, what, exc_info=task.exception())

    async def _terminate(self, row: dict[str, Any]) -> None:
        directory = self._dir(row)
        # A directory that someone removed says nothing of its processes: they carry its name.
        if directory.exists() or row["launched_at"] is not None:
            try:
                await in_daemon_thread(
                    lambda: self._executor.terminate(directory, grace_seconds=self._settings.cancel_grace_seconds)
                )
            except ExecutorUnavailable as error:
                await self._wait_for_answer(row, error)
                return
            self._unanswered.pop(row["id"], None)
        async with self._database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            while await run_events.apply(connection, current, directory, False, self._settings.retry_backoff_seconds):
                pass
            if current["state"] == "cancelling":
                await job_records.move(connection, current, "cancelled")

    async def _release(self, row: dict[str, Any]) -> None:
        """End what is left of an ended attempt once it has exited or had time to, and free its place."""
        directory = self._dir(row)
        if row["lease"] is None:
            await asyncio.to_thread(revoke, directory)
        else:
            ended = self._lingering.setdefault(row["id"], time.monotonic())
            alive = await asyncio.to_thread(self._executor.is_alive, directory)
            if alive and row["state"] in TERMINAL and time.monotonic() - ended < LINGER_SECONDS:
                return
        await asyncio.to_thread(self._executor.terminate, directory, grace_seconds=0)
        async with self._database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            # Ranks outlive a killed driver for a moment: their last metrics belong to this attempt, and the next one
            # goes on from the checkpoint that they wrote.
            while await run_events.apply(connection, current, directory, False, self._settings.retry_backoff_seconds):
                pass
            if current["state"] not in ACTIVE:
                await job_records.change(connection, current, released=True)
        self._lingering.pop(row["id"], None)


async def in_daemon_thread(function: Callable[[], Any]) -> None:
    """Call like asyncio.to_thread, but without delaying the end of the service.

    A grace period of a minute must not delay a restart, after which the cancellation is continued.
    """
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
    """Return an id that stays with the directory, wherever it is mounted and whatever the host's name."""
    path = home / "home.id"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text("ascii").strip()
    write_file(path, f"{tables.new_id('home')}\n".encode())
    return path.read_text("ascii").strip()
