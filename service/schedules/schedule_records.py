"""Schedules: created, changed, fired.

A firing and its job are inserted in one transaction, and a firing's primary key is (schedule, time). So a schedule
fires once at each time, in spite of races and crashes.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import sqlalchemy as sa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import json_schema, tables
from service.core.database import Database, insert_new
from service.core.errors import Problem, invalid, not_found
from service.core.rows import Catchup, FiredRow, FiringRow, Outcome, Overlap, ScheduleRow, as_row, first_row
from service.jobs import job_records
from service.schedules import cron
from service.webhooks import webhook_records
from trainer.spec import JobSpec, Name
from trainer.spec.problems import FieldProblem
from trainer.spec.stored_specs import to_run
from trainer.spec.zones import Zone

Cron = Annotated[str, Field(max_length=255, json_schema_extra={"minLength": 9}), AfterValidator(cron.check_cron)]
NUM_SHOWN = 5
Grace = Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)]


class ScheduleSpec(BaseModel):
    """A schedule in a request. ``{firing_date}`` in the job's window becomes the firing's date in ``timezone``."""

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

    model_config = ConfigDict(extra="forbid", json_schema_extra=json_schema.without_defaults)

    cron: Cron = ""
    timezone: Zone = ""
    job: JobSpec = None  # type: ignore[assignment]
    catchup: Catchup = "none"
    misfire_grace_seconds: Grace = 0
    overlap: Overlap = "forbid"
    paused: bool = False


async def create(database: Database, connection: AsyncConnection, spec: ScheduleSpec, tenant: str) -> ScheduleRow:
    """Create a schedule.

    Raises:
        Problem: 409 if the name is in use, 422 if the job does not fit its dataset, or ``catchup`` is ``all`` without
            overlap ``queue``.
    """
    _check_catchup(spec.catchup, spec.overlap)
    await database.exclusive(connection, f"schedule {tenant} {spec.name}")
    if await connection.scalar(sa.select(tables.schedule.c.id).where(_at(tenant, spec.name))):
        detail = f"There is a schedule '{spec.name}' already. Change it with PATCH, or delete it first."
        raise Problem(409, "schedule-exists", detail)
    job, _ = await job_records.check(connection, spec.job, tenant)
    now = tables.now()
    columns = {
        "id": tables.new_id("schedule"),
        "tenant": tenant,
        **spec.model_dump(mode="json"),
        "job": job.model_dump(mode="json"),
        "created_at": now,
        "next_fire_at": None if spec.paused else cron.next_firing(spec.cron, spec.timezone, now),
    }
    await connection.execute(tables.schedule.insert().values(columns))
    return as_row(ScheduleRow, columns)


def _check_catchup(catchup: Catchup, overlap: Overlap) -> None:
    """Raise 422 for catchup ``all`` unless overlap is ``queue``: else only one of the jobs due at once would run."""
    if catchup == "all" and overlap != "queue":
        message = (
            f"catchup all starts the jobs of all missed firings at once, but overlap {overlap} keeps only one of them"
        )
        raise invalid(FieldProblem("catchup", message, "set overlap: queue, or catchup: last"))


def _at(tenant: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.schedule.c.tenant == tenant, tables.schedule.c.name == name)


async def get(connection: AsyncConnection, tenant: str, name: str, lock: bool = False) -> ScheduleRow:
    query = sa.select(tables.schedule).where(_at(tenant, name))
    row = await first_row(connection, ScheduleRow, query.with_for_update() if lock else query)
    if row is None:
        raise not_found("schedule", name)
    return row


async def change(connection: AsyncConnection, tenant: str, name: str, patch: SchedulePatch) -> ScheduleRow:
    """Apply the fields that were sent; firings that were due while the schedule was paused are not caught up.

    A firing that was due before a change of cron, time zone or pause, and had not been fired yet, is recorded as
    missed.

    Raises:
        Problem: 404 if the tenant has no such schedule; 422 if the job does not fit its dataset, ``catchup`` does not
            fit ``overlap``, or the time zone is unknown on this machine.
    """
    row = await get(connection, tenant, name, lock=True)
    # The job is stored with its defaults, so that a later version with other defaults does not change it.
    values = patch.model_dump(mode="json", include=patch.model_fields_set)
    if "job" in values:
        job, _ = await job_records.check(connection, patch.job, tenant)
        values["job"] = job.model_dump(mode="json")
    changed = as_row(ScheduleRow, {**row, **values})
    if {"catchup", "overlap"} & values.keys():
        _check_catchup(changed["catchup"], changed["overlap"])
    times = ("cron", "timezone", "paused")
    if [row[name] for name in times] != [changed[name] for name in times]:  # type: ignore[literal-required]
        now = tables.now()
        await _miss_due(connection, row, now)
        values["next_fire_at"] = changed["next_fire_at"] = None if changed["paused"] else _following(changed, now)
    if values:
        await connection.execute(tables.schedule.update().where(tables.schedule.c.id == row["id"]).values(values))
    return changed


def _following(row: ScheduleRow, now: datetime.datetime) -> datetime.datetime | None:
    """Return the first firing after ``now``; raise 422 if this machine does not know the time zone."""
    try:
        return cron.next_firing(row["cron"], row["timezone"], now)
    except ValueError as error:
        raise invalid(FieldProblem("timezone", str(error), "change the schedule's timezone")) from None


async def _miss_due(connection: AsyncConnection, row: ScheduleRow, now: datetime.datetime) -> None:
    """Record the due firings of a locked schedule as missed."""
    if row["next_fire_at"] is None or row["next_fire_at"] > now:
        return
    try:
        due = cron.plan(row["cron"], row["timezone"], row["next_fire_at"], now, "none", 0).due
    except ValueError:  # an unknown time zone, which the change may correct
        return
    await fire_planned(connection, row, [cron.Due(at, "the schedule was changed before it was fired") for at, _ in due])


async def delete(connection: AsyncConnection, tenant: str, name: str) -> None:
    """Remove the schedule and its list of firings; the jobs it started stay."""
    row = await get(connection, tenant, name, lock=True)
    await connection.execute(tables.schedule.delete().where(tables.schedule.c.id == row["id"]))


def view(row: ScheduleRow, last_publication: dict[str, Any] | None = None) -> dict[str, Any]:
    shown = {name: value for name, value in row.items() if name not in ("id", "tenant")}
    return {**shown, "next_firings": next_firings(row), "last_publication": last_publication}


def next_firings(row: ScheduleRow) -> list[datetime.datetime]:
    """Return at most five future firings; none while paused, or if this machine does not know the time zone."""
    if row["next_fire_at"] is None:
        return []
    before = row["next_fire_at"] - datetime.timedelta(seconds=1)
    try:
        return list(itertools.islice(cron.firings(row["cron"], row["timezone"], before), NUM_SHOWN))
    except ValueError:  # other schedules are still listed; the scheduler reports the error
        return []


def fired(schedule_id: str) -> sa.Select[Any]:
    """Return a query for a schedule's firings as :class:`FiredRow`."""
    firing, job = tables.firing, tables.job
    columns = (*firing.c, job.c.state.label("job_state"), job.c.publication)
    of_its_job = firing.c.job_id == job.c.id
    return sa.select(*columns).select_from(firing.outerjoin(job, of_its_job)).where(firing.c.schedule_id == schedule_id)


def fired_view(row: FiredRow, schedule: str) -> dict[str, Any]:
    """Return a firing as users see it, with the state and publication of its job."""
    publication = row["publication"] or {}
    outcome = {name: publication.get(name) for name in ("status", "version", "held_in_a_row")}
    return {
        **firing_view(row, schedule),
        "job_state": row["job_state"],
        "publication": outcome if outcome["status"] not in (None, "none") else None,
    }


async def last_publications(connection: AsyncConnection, schedule_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the publication of each schedule's newest successful job, by the schedule's id."""
    job = tables.job.c
    succeeded = sa.and_(job.schedule_id.in_(schedule_ids), job.state == "succeeded")
    newest = sa.select(sa.func.max(job.id)).where(succeeded).group_by(job.schedule_id)
    query = sa.select(job.schedule_id, job.id, job.publication).where(job.id.in_(newest))
    names = ("status", "collection", "version", "held_in_a_row", "held_since")
    return {
        schedule_id: {"job_id": job_id, **{name: (publication or {}).get(name) for name in names}}
        for schedule_id, job_id, publication in await connection.execute(query)
    }


def firing_view(row: FiringRow, schedule: str) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "fire_at": row["fire_at_utc"],
        "firing_date": row["firing_date"],
        "kind": row["kind"],
        "outcome": row["outcome"],
        "job_id": row["job_id"],
        "reason": row["reason"],
        "created_at": row["created_at"],
    }


def job_of(row: ScheduleRow, firing_date: str) -> JobSpec:
    """Return the job of one firing: in the schedule's job, ``{firing_date}`` is replaced by the date."""
    return JobSpec.model_validate(to_run(row["job"])).fired_on(firing_date)


async def trigger(
    connection: AsyncConnection, tenant: str, name: str, firing_date: datetime.date | None
) -> dict[str, Any]:
    """Fire a schedule now, paused or not.

    ``firing_date`` None: today in the schedule's time zone.

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
        assert fired["reason"] is not None
        raise invalid(FieldProblem("job", fired["reason"]))
    return firing_view(fired, name)


async def fire(
    connection: AsyncConnection,
    row: ScheduleRow,
    at: datetime.datetime,
    kind: Literal["cron", "trigger"],
    date: str,
    missed: str | None = None,
) -> FiringRow | None:
    """Record the firing of a locked schedule at one time and start its job unless it was ``missed``.

    Webhooks are not told of a missed firing here.

    Returns:
        The firing, or None if the schedule has already fired at that time.
    """
    firing: FiringRow = {
        "schedule_id": row["id"],
        "fire_at_utc": at,
        "kind": kind,
        "outcome": "missed",
        "firing_date": date,
        "job_id": None,
        "reason": missed,
        "created_at": tables.now(),
    }
    inserted = await connection.execute(insert_new(connection.dialect.name, tables.firing), firing)
    if inserted.rowcount != 1:
        return None
    if missed is None:
        started = await _start(connection, row, date)
        this_firing = sa.and_(tables.firing.c.schedule_id == row["id"], tables.firing.c.fire_at_utc == at)
        await connection.execute(tables.firing.update().where(this_firing).values(started._asdict()))
        firing["outcome"], firing["job_id"], firing["reason"] = started
    if firing["outcome"] in ("skipped", "failed"):
        event: webhook_records.Event = "schedule.skipped" if firing["outcome"] == "skipped" else "schedule.failed"
        await webhook_records.tell(connection, row["tenant"], event, firing_view(firing, row["name"]))
    return firing


async def fire_planned(connection: AsyncConnection, row: ScheduleRow, due: Sequence[cron.Due]) -> list[FiringRow]:
    """Record the firings of a locked schedule that are due, start their jobs, and return them.

    One webhook event reports all that were missed, since a message for each would be too many: the last, their number,
    and the time of the first.
    """
    fired = []
    for at, missed in due:
        firing = await fire(connection, row, at, "cron", cron.firing_date(at, row["timezone"]), missed)
        if firing is not None:
            fired.append(firing)
    if missed_ones := [firing for firing in fired if firing["outcome"] == "missed"]:
        last, first = firing_view(missed_ones[-1], row["name"]), missed_ones[0]["fire_at_utc"]
        payload = {**last, "num_missed": len(missed_ones), "first_fire_at": first}
        await webhook_records.tell(connection, row["tenant"], "schedule.missed", payload)
    return fired


class _Started(NamedTuple):
    """Outcome of a firing: columns of its row."""

    outcome: Outcome
    job_id: str | None = None
    reason: str | None = None


async def _start(connection: AsyncConnection, row: ScheduleRow, date: str) -> _Started:
    """Start the job of a firing; return the outcome, with the reason if no job was started."""
    active = await job_records.active_of(connection, row["id"])
    if active and row["overlap"] == "forbid":
        return _Started("skipped", reason=f"job {active[0]} has not ended, and overlap is forbid")
    try:
        spec = job_of(row, date)
        spec, dataset = await job_records.check(connection, spec, row["tenant"])
    except Problem as problem:
        return _Started("failed", reason=": ".join(filter(None, (problem.detail, problem.remedy))))
    except ValueError as error:  # a template that a newer version reads more strictly
        return _Started("failed", reason=str(error))
    if row["overlap"] == "replace":
        for job_id in active:
            with contextlib.suppress(Problem):  # the job has ended meanwhile
                await job_records.cancel(connection, job_id)
    job = await job_records.create(connection, spec, dataset, row["tenant"], (row["id"], row["name"]))
    return _Started("started", job["id"])
