"""The home page: running jobs, held versions with reasons, next firings, and the state of the service."""

from __future__ import annotations

import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import pagination, tables
from service.core.errors import Problem
from service.core.pagination import PageRequest
from service.core.rows import ScheduleRow, all_rows
from service.features.store_access import in_store
from service.jobs import job_records
from service.jobs.states import ACTIVE
from service.ops.readiness import readiness
from service.schedules import schedule_records
from service.web.content import collections
from service.web.content.job_rows import job_row
from service.web.request import DashboardRequest

UNFINISHED = ("queued", *ACTIVE)
NUM_UNDER_WAY = 12
NUM_ENDED = 6
NUM_FIRINGS = 6
RECENT = datetime.timedelta(days=1)
"""Period before now in which failed jobs are counted."""


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return the content of the page; a part that the key may not see is None."""
    content: dict[str, Any] = dict.fromkeys(
        ("counts", "under_way", "ended", "schedules", "collections", "held", "store_away")
    )
    content["health"] = await readiness(request.state)
    if request.allows("jobs:read"):
        async with request.state.database.read() as connection:
            content["counts"] = await _counts(connection, request.principal.sees)
            unfinished = tables.job.c.state.in_(UNFINISHED)
            content["under_way"] = await _jobs(connection, request, unfinished, NUM_UNDER_WAY)
            # Not "in TERMINAL": the database would use the index of states, read nearly all jobs and sort them.
            content["ended"] = await _jobs(connection, request, ~unfinished, NUM_ENDED)
            content["schedules"] = await _next_firings(connection, request.principal.tenant)
    store = request.state.store_health.answer(0)  # readiness() has waited for it
    if request.allows("features:read") and store is not None and not store.reached:
        content["store_away"] = store.message  # each collection would wait for the server
    elif request.allows("features:read"):
        try:
            content["collections"] = await in_store(collections.listed, request)
        except Problem as problem:
            if problem.status != 503:
                raise
            content["store_away"] = problem.detail  # jobs and schedules are still shown
        else:
            content["held"] = [
                collection for collection in content["collections"] if collection["held_now"] is not None
            ]
    return content


async def _counts(connection: AsyncConnection, tenant: str | None) -> dict[str, int]:
    job = tables.job.c
    mine = sa.true() if tenant is None else job.tenant == tenant
    number = sa.func.count().label("number")
    unfinished = sa.select(job.state, number).where(mine, job.state.in_(UNFINISHED)).group_by(job.state)
    by_state = {row.state: row.number for row in await connection.execute(unfinished)}
    waiting = by_state.pop("queued", 0)
    lately = sa.and_(mine, job.state == "failed", job.finished_at >= tables.now() - RECENT)
    failed = await connection.scalar(sa.select(sa.func.count()).select_from(tables.job).where(lately))
    return {"running": sum(by_state.values()), "waiting": waiting, "failed": failed or 0}


async def _jobs(
    connection: AsyncConnection, request: DashboardRequest, chosen: sa.ColumnElement[bool], limit: int
) -> list[dict[str, Any]]:
    query = job_records.listing(request.principal.sees, None, None, None).where(chosen)
    page = await pagination.page(connection, dict[str, Any], query, tables.job.c.id, PageRequest(limit), dict)
    return [job_row(job, tables.now()) for job in await job_records.views(connection, page.items)]


async def _next_firings(connection: AsyncConnection, tenant: str) -> list[dict[str, Any]]:
    schedule = tables.schedule.c
    due = sa.select(tables.schedule).where(schedule.tenant == tenant, schedule.next_fire_at.is_not(None))
    rows = await all_rows(connection, ScheduleRow, due.order_by(schedule.next_fire_at).limit(NUM_FIRINGS))
    return [schedule_records.view(row) for row in rows]
