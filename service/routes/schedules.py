"""Schedules: created, changed, triggered; what they fired."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict

from service import errors, pages, schedules, tables
from service.auth import require
from service.pages import Page
from service.schedules import SchedulePatch, ScheduleSpec

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])
READ = [Depends(require("jobs:read"))]
WRITE = [Depends(require("jobs:write"))]


class ScheduleView(BaseModel):
    name: str
    cron: str
    timezone: str
    job: dict[str, Any]
    catchup: schedules.Catchup
    misfire_grace_seconds: float
    overlap: schedules.Overlap
    paused: bool
    created_at: AwareDatetime
    next_fire_at: AwareDatetime | None


class FiringView(BaseModel):
    """One instant of a schedule. ``missed``: not run at all; ``skipped``: its overlap forbade it; ``failed``: its job
    could not be submitted."""

    schedule: str
    fire_at: AwareDatetime
    firing_date: datetime.date
    kind: Literal["cron", "trigger"]
    outcome: Literal["started", "skipped", "missed", "failed"]
    job_id: str | None
    reason: str | None
    created_at: AwareDatetime


class TriggerRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    firing_date: datetime.date | None = None


@router.post("", status_code=201, dependencies=WRITE, responses=errors.responses(409))
async def create(request: Request, response: Response, body: ScheduleSpec) -> ScheduleView:
    database = request.app.state.database
    async with database.write() as connection:
        row = await schedules.create(database, connection, body)
    response.headers["Location"] = f"/v1/schedules/{body.name}"
    return ScheduleView(**schedules.view(row))


@router.get("", dependencies=READ)
async def list_schedules(
    request: Request, limit: Annotated[int, Query(ge=1, le=200)] = 50, cursor: str | None = None
) -> Page[ScheduleView]:
    table = tables.schedule
    async with request.app.state.database.read() as connection:
        rows, following = await pages.by_name(connection, sa.select(table), table.c.name, limit, cursor)
    return Page(items=[ScheduleView(**schedules.view(row)) for row in rows], next_cursor=following)


@router.get("/{name}", dependencies=READ, responses=errors.responses(404))
async def get(request: Request, name: str) -> ScheduleView:
    async with request.app.state.database.read() as connection:
        return ScheduleView(**schedules.view(await schedules.get(connection, name)))


@router.patch("/{name}", dependencies=WRITE, responses=errors.responses(404))
async def change(request: Request, name: str, body: SchedulePatch) -> ScheduleView:
    async with request.app.state.database.write() as connection:
        return ScheduleView(**schedules.view(await schedules.change(connection, name, body)))


@router.delete("/{name}", status_code=204, dependencies=WRITE, responses=errors.responses(404))
async def delete(request: Request, name: str) -> None:
    async with request.app.state.database.write() as connection:
        await schedules.delete(connection, name)


@router.post("/{name}/trigger", status_code=202, dependencies=WRITE, responses=errors.responses(404, 409))
async def trigger(request: Request, response: Response, name: str, body: TriggerRequest | None = None) -> FiringView:
    """Fires now, also while paused; 409 where its last job has not ended and overlap is ``forbid``."""
    async with request.app.state.database.write() as connection:
        fired = await schedules.trigger(connection, name, body.firing_date if body else None)
    response.headers["Location"] = f"/v1/jobs/{fired['job_id']}"
    return FiringView(**fired)


@router.get("/{name}/firings", dependencies=READ, responses=errors.responses(404))
async def firings(
    request: Request, name: str, limit: Annotated[int, Query(ge=1, le=200)] = 50, cursor: str | None = None
) -> Page[FiringView]:
    """Newest first."""
    table = tables.firing
    async with request.app.state.database.read() as connection:
        schedule = await schedules.get(connection, name)
        query = sa.select(table).where(table.c.schedule_id == schedule["id"])
        rows, following = await pages.newest_instants(connection, query, table.c.fire_at_utc, limit, cursor)
    items = [FiringView(**schedules.firing_view(row, name)) for row in rows]
    return Page(items=items, next_cursor=following)
