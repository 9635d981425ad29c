"""The queue: chooses the job to start next, and records why each other job waits."""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import disk, logs, tables, thread_pools
from service.core.rows import first_row
from service.jobs import admission, job_records, resource_prediction, run_events
from service.jobs.admission import ResourceRequest
from service.jobs.executors.base import ExecutorUnavailable
from service.jobs.executors.registry import placement_of
from service.jobs.job_row import JobRow
from service.jobs.runner_context import BackgroundTasks, RunnerContext
from service.jobs.states import ACTIVE, backoff_seconds
from trainer.spec import JobSpec
from trainer.spec.reading import problems_of
from trainer.spec.stored_specs import StoredJob, names_of, read

log = logging.getLogger("evenkeel.runner")


class JobQueue:
    """Claims the queued jobs of this EVENKEEL_HOME, in order, when there is room for them."""

    def __init__(self, context: RunnerContext):
        self._context = context
        self._host = admission.host(context.settings)
        self._placement = placement_of(context.settings)
        self._counting = BackgroundTasks("failed while its rows were counted")

    def close(self) -> None:
        self._counting.cancel()

    async def claim(self) -> bool:
        """Claim the first job in the queue if there is room for it, else record why it and the other jobs wait.

        The oldest job determines the tenant whose turn it is. The first job in the queue is that tenant's job of
        highest priority, among equals the oldest. Other jobs may start before it only while it waits for a backoff to
        elapse or for its last attempt to be gone. So a large job is started eventually, however many small jobs come
        after it. A job of a schedule enters the queue only when all older jobs of the schedule have ended.

        Returns:
            True if a job was claimed, so that there may be room for another.
        """
        job = tables.job.c
        now = tables.now()
        # A time further ahead than any backoff comes from a clock that was set back afterwards.
        longest = datetime.timedelta(seconds=backoff_seconds(99, self._context.settings.retry_backoff_seconds))
        due = sa.or_(job.not_before.is_(None), job.not_before <= now, job.not_before > now + longest)
        # A job that ran here before has its checkpoints here.
        of_this_home = sa.or_(job.home_id.is_(None), job.home_id == self._context.home_id)
        ready = sa.and_(job.state == "queued", due, of_this_home, job.released.is_(True))
        waiting = sa.and_(ready, _older_of_its_schedule().is_(None))
        async with self._context.database.read() as connection:
            turn_of = sa.select(job.tenant).where(waiting).order_by(job.id).limit(1).scalar_subquery()
            queue = sa.select(tables.job).where(waiting, job.tenant == turn_of).order_by(priority().desc(), job.id)
            head = await first_row(connection, JobRow, queue.limit(1))
            held = {} if head is None else await self._held(connection, head["tenant"])
        if head is None:
            await self._explain(ready, _after_older())
            return False
        request: ResourceRequest | None = None
        if head["needs"] is None:
            # In the background: the queue waits for it, but existing runs do not.
            self._counting.start(head["id"], lambda: self._counted(head))
            reason: str | None = "the rows of its dataset are being counted, to predict the memory that it needs"
        else:
            request, reason = await self._room_for(ResourceRequest.read(head["needs"]), held)
        if request is None:
            await self._explain(ready, _told(head, str(reason)))
            return False
        async with self._context.database.write() as connection:
            query = sa.select(tables.job).where(waiting, job.id == head["id"]).with_for_update(skip_locked=True)
            row = await first_row(connection, JobRow, query)
            if row is not None:
                await self._take(connection, row, request.workers, reason)
        return row is not None

    async def _held(self, connection: AsyncConnection, tenant: str) -> dict[str, ResourceRequest]:
        """Return the resources, by job id, that the runs under this ``EVENKEEL_HOME`` use.

        Ids of tenants other than ``tenant`` are replaced by neutral names.
        """
        job = tables.job.c
        unreleased = sa.and_(job.home_id == self._context.home_id, job.released.is_(False))
        active = sa.select(job.id, job.tenant, job.needs, job.attempts).where(unreleased)
        return {
            row.id if row.tenant == tenant else f"another tenant's run ({number})": ResourceRequest.read(
                row.needs
            ).taken(job_records.workers_of(row.attempts))
            for number, row in enumerate(await connection.execute(active), 1)
            if row.needs
        }

    async def _room_for(
        self, needs: ResourceRequest, held: dict[str, ResourceRequest]
    ) -> tuple[ResourceRequest | None, str | None]:
        """Return (the largest form of the request that fits now or None, the reason why a larger form does not fit)."""
        shortage, max_runs = disk.shortage(self._context.settings), self._context.settings.max_runs
        if shortage is not None:
            return None, shortage
        if self._placement.uses_this_host:
            least = needs.choices()[-1].workers

            def refuse(choice: ResourceRequest) -> str | None:
                # The smallest number of workers was checked when the job was submitted.
                never = admission.impossible(choice, self._host) if choice.workers > least else None
                return never[0] if never else admission.obstacle(choice, self._host, held, max_runs)

            return admission.choose(needs, refuse)
        try:
            nodes = await asyncio.to_thread(self._context.executor.room)
        except ExecutorUnavailable as error:
            return None, str(error)
        return admission.choose(needs, lambda choice: admission.cluster_obstacle(choice, nodes, held, max_runs))

    async def _explain(self, ready: sa.ColumnElement[bool], reason: sa.ColumnElement[str]) -> None:
        """Record in each ready job the reason why it waits, if the reason changed."""
        job = tables.job.c
        untold = sa.and_(ready, job.reason.is_distinct_from(reason))
        async with self._context.database.read() as connection:
            if await connection.scalar(sa.select(job.id).where(untold).limit(1)) is None:
                return
        async with self._context.database.write() as connection:
            await connection.execute(tables.job.update().where(untold).values(reason=reason))

    async def _counted(self, row: JobRow) -> None:
        logs.job_id.set(row["id"])
        try:
            needs = await thread_pools.in_thread(resource_prediction.of_row, self._context.settings, row)
        except ValueError as failure:
            await self._refuse_unreadable(row["id"], failure)
            return
        least = needs.choices()[-1]
        problem = admission.impossible(least, self._host) if self._placement.uses_this_host else None
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            if current["state"] != "queued":
                return
            await job_records.change(connection, current, needs=needs.document())
            if problem is not None:
                error = {"code": "does-not-fit", "message": problem[0], "remedy": problem[1]}
                await self._take(connection, current)
                await run_events.fail(connection, current, error, False, self._context.settings.retry_backoff_seconds)

    async def _refuse_unreadable(self, job_id: str, failure: ValueError) -> None:
        """Fail a job whose spec this version can no longer read: as the first in the queue it would block others."""
        log.error("job %s: its spec cannot be read", job_id, exc_info=failure)
        remedy = "submit it again in the form that this version reads"
        problems = problems_of(failure.errors()) if isinstance(failure, ValidationError) else [str(failure)]
        error = {"code": "spec-unreadable", "message": "; ".join(map(str, problems)), "remedy": remedy}
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, job_id)
            if current["state"] == "queued":
                await self._take(connection, current)
                await run_events.fail(connection, current, error, False, self._context.settings.retry_backoff_seconds)

    async def _take(
        self, connection: AsyncConnection, row: JobRow, workers: int | None = None, because: str | None = None
    ) -> None:
        """Claim a job for a new attempt.

        ``workers``: number of workers that the attempt begins with; None for a job that is failed at once instead of
        run. ``because``: the reason for fewer workers than the job asks for; None if it gets all.
        """
        attempt = row["attempt"] + 1
        # The lease is also in run.json: an attempt that was given up finds another lease there and publishes nothing.
        claimed: dict[str, Any] = {
            "home_id": self._context.home_id,
            "lease": secrets.token_hex(16),
            "released": False,
            "launched_at": None,
            "heartbeat_at": None,
        }
        # The clocks of hosts may differ a little, but no job may start before it was created.
        started_at = row["started_at"] or max(tables.now(), row["created_at"])
        claimed |= {"started_at": started_at, "error": None, "publication": None}
        row["attempt"] = attempt
        reason = None
        if workers is not None:
            claimed["attempts"] = job_records.with_attempt(row["attempts"], attempt, workers, because)
            all_workers = StoredJob(row["spec"]).resources.num_workers
            reason = because and f"{workers} of {all_workers} workers: {because}"
        await job_records.move(connection, row, "claimed", attempt=attempt, reason=reason, not_before=None, **claimed)


def priority() -> sa.Function[int]:
    """Return an SQL expression for the priority of a job: that of its stored spec, else the default."""
    stored = (tables.job.c.spec[name].as_integer() for name in names_of(JobSpec, "priority"))
    return sa.func.coalesce(*stored, read({}, JobSpec, "priority"))


def _older_of_its_schedule() -> sa.ScalarSelect[str | None]:
    """Return a subquery for the id of the oldest unended job of the same schedule that precedes a job; null if none."""
    older = sa.alias(tables.job).c
    before = sa.and_(older.schedule_id == tables.job.c.schedule_id, older.id < tables.job.c.id)
    query = sa.select(sa.func.min(older.id)).where(before, older.state.in_(("queued", *ACTIVE)))
    return query.correlate(tables.job).scalar_subquery()


def _after_older() -> sa.ColumnElement[str]:
    """Return an SQL expression for the reason why a job waits for an older job of its schedule; null if it does not."""
    return sa.literal("after ") + _older_of_its_schedule() + ", an older job of its schedule that has not ended"


def _told(head: JobRow, reason: str) -> sa.ColumnElement[str]:
    """Return an SQL expression for the reason why a job waits; it reveals nothing about other tenants' jobs."""
    job = tables.job.c
    return sa.case(
        (_older_of_its_schedule().is_not(None), _after_older()),
        (job.id == head["id"], reason),
        (job.tenant == head["tenant"], admission.behind(head["id"], reason)),
        else_=admission.BEHIND_ANOTHER_TENANT,
    )
