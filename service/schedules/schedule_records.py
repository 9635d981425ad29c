"""Schedules: created, changed, fired.

A firing and the job that it starts are one transaction, and a firing's primary key is (schedule, time): in spite of
races and crashes, a schedule fires once at each time.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import tables
from service.core.database import Database
from service.core.errors import Problem, invalid, not_found
from service.jobs import job_records
from service.schedules import cron
from service.webhooks import webhook_records
from trainer.spec import FIRING_DATE, JobSpec, Name
from trainer.spec.problems import FieldProblem

Row = dict[str, Any]
Cron = Annotated[str, Field(max_length=255), AfterValidator(cron.check_cron)]
Zone = Annotated[str, Field(max_length=64), AfterValidator(cron.check_zone)]
Catchup = Literal["none", "last", "all"]
Overlap = Literal["forbid", "queue", "replace"]
NUM_SHOWN = 5
Grace = Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)]


class ScheduleSpec(BaseModel):
    """A schedule as sent. ``{firing_date}`` in the job's window becomes the firing's date in ``timezone``."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    cron: Cron
    timezone: Zone = "UTC"
    job: JobSpec
    catchup: Catchup = "none"
    misfire_grace_seconds: Grace = 3600
    overlap: Overlap = "forbid"
    paused: bool = False


class SchedulePatch(BaseModel):
    """The fields to change; none of them accepts null."""

    model_config = ConfigDict(extra="forbid")

    cron: Cron = ""
    timezone: Zone = ""
    job: JobSpec = None  # type: ignore[assignment]
    catchup: Catchup = "none"
    misfire_grace_seconds: Grace = 0
    overlap: Overlap = "forbid"
    paused: bool = False


async def create(database: Database, connection: AsyncConnection, spec: ScheduleSpec, tenant: str) -> Row:
    """Create a schedule.

    Raises:
        Problem: 409 if the name is in use, 422 if the job does not fit its dataset.
    """
    await database.exclusive(connection, f"schedule {tenant} {spec.name}")
    if await connection.scalar(sa.select(tables.schedule.c.id).where(_at(tenant, spec.name))):
        detail = f"There is a schedule '{spec.name}' already. Change it with PATCH, or delete it first."
        raise Problem(409, "schedule-exists", detail)
    await job_records.check(connection, spec.job, tenant)
    now = tables.now()
    row = {
        "id": tables.new_id("schedule"),
        "tenant": tenant,
        **spec.model_dump(mode="json"),
        "created_at": now,
        "next_fire_at": None if spec.paused else cron.next_firing(spec.cron, spec.timezone, now),
    }
    await connection.execute(tables.schedule.insert().values(row))
    return row


def _at(tenant: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.schedule.c.tenant == tenant, tables.schedule.c.name == name)


async def get(connection: AsyncConnection, tenant: str, name: str, lock: bool = False) -> Row:
    query = sa.select(tables.schedule).where(_at(tenant, name))
    row = (await connection.execute(query.with_for_update() if lock else query)).mappings().first()
    if row is None:
        raise not_found("schedule", name)
    return dict(row)


async def change(connection: AsyncConnection, tenant: str, name: str, patch: SchedulePatch) -> Row:
    """Apply the fields that were sent; firings that were due while the schedule was paused are not caught up."""
    row = await get(connection, tenant, name, lock=True)
    values = patch.model_dump(mode="json", exclude_unset=True)
    if "job" in values:
        await job_records.check(connection, patch.job, tenant)
    row.update(values)
    if {"cron", "timezone", "paused"} & values.keys():
        values["next_fire_at"] = None if row["paused"] else cron.next_firing(row["cron"], row["timezone"], tables.now())
        row.update(values)
    if values:
        await connection.execute(tables.schedule.update().where(tables.schedule.c.id == row["id"]).values(values))
    return row


async def delete(connection: AsyncConnection, tenant: str, name: str) -> None:
    """Remove the schedule and its list of firings; the jobs it started stay."""
    row = await get(connection, tenant, name, lock=True)
    await connection.execute(tables.schedule.delete().where(tables.schedule.c.id == row["id"]))


def view(row: Row) -> dict[str, Any]:
    names = (
        "name", "cron", "timezone", "job", "catchup", "misfire_grace_seconds", "overlap", "paused", "created_at",
        "next_fire_at",
    )  # fmt: skip
    return {**{name: row[name] for name in names}, "next_firings": next_firings(row)}


def next_firings(row: Row) -> list[datetime.datetime]:
    """Return at most five future firings; none while paused, or if this machine does not know the time zone."""
    if row["next_fire_at"] is None:
        return []
    before = row["next_fire_at"] - datetime.timedelta(seconds=1)
    try:
        return list(itertools.islice(cron.firings(row["cron"], row["timezone"], before), NUM_SHOWN))
    except ValueError:  # others of the list are shown all the same; the scheduler says what is the matter
        return []


def firing_view(row: Row, schedule: str) -> dict[str, Any]:
    names = ("firing_date", "kind", "outcome", "job_id", "reason", "created_at")
    return {"schedule": schedule, "fire_at": row["fire_at_utc"], **{name: row[name] for name in names}}


def job_of(row: Row, firing_date: str) -> JobSpec:
    """Return the job of one firing: its window begins where the template has ``{firing_date}``."""
    document = dict(row["job"])
    window = document["dataset"].get("window")
    if window is not None and window["start"] == FIRING_DATE:
        document["dataset"] = {**document["dataset"], "window": {**window, "start": firing_date}}
    return JobSpec.model_validate(document)


async def trigger(
    connection: AsyncConnection, tenant: str, name: str, firing_date: datetime.date | None
) -> dict[str, Any]:
    """Fire a schedule now, paused or not.

    Args:
        connection: The transaction.
        tenant: The owner of the schedule.
        name: The schedule.
        firing_date: The date of the firing; None for today in the schedule's time zone.

    Raises:
        Problem: 409 if a job of the schedule has not ended and overlap is ``forbid``, 422 if its job can no longer be
            submitted.
    """
    row = await get(connection, tenant, name, lock=True)
    now = tables.now()
    try:
        date = firing_date.isoformat() if firing_date else cron.firing_date(now, row["timezone"])
    except ValueError as error:
        raise invalid(
            FieldProblem("timezone", str(error), "give firing_date, or change the schedule's timezone")
        ) from None
    fired = await fire(connection, row, now, "trigger", date)
    assert fired is not None
    if fired["outcome"] == "skipped":
        raise Problem(409, "schedule-busy", f"Schedule '{name}' did not fire: {fired['reason']}.")
    if fired["outcome"] == "failed":
        raise invalid(FieldProblem("job", fired["reason"]))
    return firing_view(fired, name)


async def fire(
    connection: AsyncConnection, row: Row, at: datetime.datetime, kind: str, date: str, missed: str | None = None
) -> Row | None:
    """Record the firing of a locked schedule at one time and start its job unless it was ``missed``.

    Webhooks are told of missed firings by :func:`tell_missed`.

    Returns:
        The firing, or None if the schedule has already fired at that time.
    """
    firing: Row = {
        "schedule_id": row["id"],
        "fire_at_utc": at,
        "kind": kind,
        "outcome": "missed",
        "firing_date": date,
        "job_id": None,
        "reason": missed,
        "created_at": tables.now(),
    }
    inserted = await connection.execute(_insert_once(connection, firing))
    if inserted.rowcount != 1:
        return None
    if missed is None:
        outcome = await _start(connection, row, date)
        this_firing = sa.and_(tables.firing.c.schedule_id == row["id"], tables.firing.c.fire_at_utc == at)
        await connection.execute(tables.firing.update().where(this_firing).values(outcome))
        firing.update(outcome)
    if firing["outcome"] in ("skipped", "failed"):
        event = f"schedule.{firing['outcome']}"
        await webhook_records.tell(connection, row["tenant"], event, firing_view(firing, row["name"]))  # type: ignore[arg-type]
    return firing


async def tell_missed(connection: AsyncConnection, row: Row, firings: Sequence[Row]) -> None:
    """Send one webhook event for all firings that a schedule missed in one outage.

    It has the last of them, their number, and the time of the first: nobody reads a thousand messages.
    """
    if firings:
        last = firing_view(firings[-1], row["name"])
        told = {**last, "num_missed": len(firings), "first_fire_at": firings[0]["fire_at_utc"]}
        await webhook_records.tell(connection, row["tenant"], "schedule.missed", told)


def _insert_once(connection: AsyncConnection, firing: Row) -> sa.Insert:
    if connection.dialect.name == "sqlite":
        return sqlite.insert(tables.firing).values(firing).on_conflict_do_nothing()
    return postgresql.insert(tables.firing).values(firing).on_conflict_do_nothing()


async def _start(connection: AsyncConnection, row: Row, date: str) -> dict[str, Any]:
    """Start the job of a firing; return the columns to store, with the reason if there is no job."""
    active = await job_records.active_of(connection, row["id"])
    if active and row["overlap"] == "forbid":
        return {"outcome": "skipped", "reason": f"job {active[0]} has not ended, and overlap is forbid"}
    try:
        spec = job_of(row, date)
        dataset = await job_records.check(connection, spec, row["tenant"])
    except Problem as problem:
        return {"outcome": "failed", "reason": ": ".join(filter(None, (problem.detail, problem.remedy)))}
    except ValueError as error:  # a template that a newer version reads more strictly
        return {"outcome": "failed", "reason": str(error)}
    if row["overlap"] == "replace":
        for job_id in active:
            await job_records.cancel(connection, job_id)
    job = await job_records.create(connection, spec, dataset, row["tenant"], (row["id"], row["name"]))
    return {"outcome": "started", "job_id": job["id"], "reason": None}
