"""Schedules: next firings, past firings, and their outcomes."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import pagination, tables
from service.core.rows import FiredRow, ScheduleRow, first_row
from service.schedules import schedule_records
from service.web.request import DashboardRequest

NUM_SCHEDULES = 50
NUM_FIRINGS = 25


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return a page of the tenant's schedules."""
    schedules = sa.select(tables.schedule).where(tables.schedule.c.tenant == request.principal.tenant)
    async with request.state.database.read() as connection:
        page = await pagination.page(
            connection, ScheduleRow, schedules, tables.schedule.c.name, request.paging(NUM_SCHEDULES),
            lambda row: row, descending=False,
        )  # fmt: skip
        shown = [await _with_last_firing(connection, row) for row in page.items]
    return {"schedules": shown, "more": page.next_cursor}


async def gather_one(request: DashboardRequest) -> dict[str, Any]:
    """Return the schedule that the address names, and a page of its firings.

    Raises:
        Problem: 404 if the tenant has no schedule of that name.
    """
    name = request.path["schedule"]
    async with request.state.database.read() as connection:
        row = await schedule_records.get(connection, request.principal.tenant, name)
        page = await pagination.page(
            connection, FiredRow, schedule_records.fired(row["id"]), tables.firing.c.fire_at_utc,
            request.paging(NUM_FIRINGS), lambda firing: schedule_records.fired_view(firing, name),
            by_time=True,
        )  # fmt: skip
    return {"schedule": schedule_records.view(row), "firings": page.items, "older": page.next_cursor}


async def _with_last_firing(connection: AsyncConnection, row: ScheduleRow) -> dict[str, Any]:
    latest = schedule_records.fired(row["id"]).order_by(tables.firing.c.fire_at_utc.desc()).limit(1)
    firing = await first_row(connection, FiredRow, latest)
    last = None if firing is None else schedule_records.fired_view(firing, row["name"])
    return {**schedule_records.view(row), "last": last}
