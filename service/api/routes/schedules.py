"""Routes to create, change and trigger schedules, and to list their firings."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import errors, pagination, tables
from service.core.pagination import Page, Paging, PagingByTime
from service.core.rows import Catchup, FiredRow, Outcome, Overlap, ScheduleRow
from service.identity import idempotency
from service.identity.auth import JobsReader, JobsWriter
from service.identity.idempotency import IdempotencyKey
from service.jobs import job_records
from service.schedules import schedule_records
from service.schedules.schedule_records import SchedulePatch, ScheduleSpec

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])


class ScheduleView(BaseModel):
    """A schedule. ``last_publication`` describes the publication of the schedule's newest successful job.

    ``last_publication`` has the fields ``job_id``, ``status`` (``published``, ``held``, ``none``), ``collection`` and
    ``version``. If the version was held, ``held_in_a_row`` and ``held_since`` are added.
    """

    name: str
    cron: str
    timezone: str
    job: dict[str, Any]
    catchup: Catchup
    misfire_grace_seconds: float
    overlap: Overlap
    paused: bool
    created_at: AwareDatetime
    next_fire_at: AwareDatetime | None
    next_firings: list[AwareDatetime]
    last_publication: dict[str, Any] | None


class FiringView(BaseModel):
    """One firing of a schedule.

    States: ``missed``: the firing was not run at all; ``skipped``: the schedule's overlap setting forbade it;
    ``failed``: its job could not be submitted. ``job_state`` is the present state of its job. ``publication``:
    ``status`` (``published`` or ``held``) and ``version`` of the job's publication, with ``held_in_a_row`` if it was
    held.
    """

    schedule: str
    fire_at: AwareDatetime
    firing_date: datetime.date
    kind: Literal["cron", "trigger"]
    outcome: Outcome
    job_id: str | None
    reason: str | None
    created_at: AwareDatetime
    job_state: str | None = None
    publication: dict[str, Any] | None = None


class TriggerRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    firing_date: datetime.date | None = None


@router.post("", status_code=201, responses=errors.responses(409))
async def create(request: Request, response: Response, body: ScheduleSpec, principal: JobsWriter) -> ScheduleView:
    database = request.app.state.database
    async with database.write() as connection:
        row = await schedule_records.create(database, connection, body, principal.tenant)
    response.headers["Location"] = f"/v1/schedules/{body.name}"
    return _view(row)


@router.get("")
async def list_schedules(request: Request, principal: JobsReader, paging: Paging) -> Page[ScheduleView]:
    table = tables.schedule
    query = sa.select(table).where(table.c.tenant == principal.tenant)
    async with request.app.state.database.read() as connection:
        page = await pagination.page(
            connection, ScheduleRow, query, table.c.name, paging, lambda row: row, descending=False
        )
        last = await schedule_records.last_publications(connection, [row["id"] for row in page.items])
    views = [_view(row, last.get(row["id"])) for row in page.items]
    return Page[ScheduleView](items=views, next_cursor=page.next_cursor)


@router.get("/{name}", responses=errors.responses(404))
async def get(request: Request, name: str, principal: JobsReader) -> ScheduleView:
    async with request.app.state.database.read() as connection:
        return await _shown(connection, await schedule_records.get(connection, principal.tenant, name))


@router.patch("/{name}", responses=errors.responses(404))
async def change(request: Request, name: str, body: SchedulePatch, principal: JobsWriter) -> ScheduleView:
    async with request.app.state.database.write() as connection:
        return await _shown(connection, await schedule_records.change(connection, principal.tenant, name, body))


@router.delete("/{name}", status_code=204, responses=errors.responses(404))
async def delete(request: Request, name: str, principal: JobsWriter) -> None:
    async with request.app.state.database.write() as connection:
        await schedule_records.delete(connection, principal.tenant, name)


@router.post("/{name}/trigger", status_code=202, responses=errors.responses(404, 409))
async def trigger(
    request: Request,
    response: Response,
    name: str,
    principal: JobsWriter,
    body: TriggerRequest | None = None,
    idempotency_key: IdempotencyKey = None,
) -> FiringView:
    """Fire a schedule now, even if it is paused; 409 if its last job is still active and overlap is ``forbid``."""
    database, date = request.app.state.database, body.firing_date if body else None

    async def act(reservation: idempotency.Reservation | None) -> FiringView:
        async with database.write() as connection:
            await job_records.refuse_too_many(database, connection, request.app.state.settings, principal.tenant)
            fired = FiringView(**await schedule_records.trigger(connection, principal.tenant, name, date))
            await idempotency.complete(connection, reservation, answer=fired.model_dump(mode="json"))
        return fired

    request_text = f"trigger {principal.tenant} {name} {date}"
    made = await idempotency.once(database, principal.key_id, idempotency_key, request_text, act)
    firing = FiringView(**(made.answer or {})) if isinstance(made, idempotency.Done) else made
    response.headers["Location"] = f"/v1/jobs/{firing.job_id}"
    return firing


@router.get("/{name}/firings", responses=errors.responses(404))
async def firings(request: Request, name: str, principal: JobsReader, paging: PagingByTime) -> Page[FiringView]:
    """List the firings of a schedule, newest first."""
    async with request.app.state.database.read() as connection:
        schedule = await schedule_records.get(connection, principal.tenant, name)
        query = schedule_records.fired(schedule["id"])

        def view(row: FiredRow) -> FiringView:
            return FiringView(**schedule_records.fired_view(row, name))

        return await pagination.page(
            connection, FiredRow, query, tables.firing.c.fire_at_utc, paging, view, by_time=True
        )


async def _shown(connection: AsyncConnection, row: ScheduleRow) -> ScheduleView:
    last = await schedule_records.last_publications(connection, [row["id"]])
    return _view(row, last.get(row["id"]))


def _view(row: ScheduleRow, last_publication: dict[str, Any] | None = None) -> ScheduleView:
    return ScheduleView(**schedule_records.view(row, last_publication))
