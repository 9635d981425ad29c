"""The background task that fires schedules. Any number of processes may run it on one database."""

from __future__ import annotations

import datetime
import logging

import sqlalchemy as sa

from service.core import tables
from service.core.database import Database
from service.core.rows import ScheduleRow, all_rows, first_row
from service.core.task_health import TaskHealth, repeat
from service.schedules import cron, schedule_records

log = logging.getLogger("evenkeel.scheduler")

CLOCK_SET_BACK = datetime.timedelta(seconds=5)


async def run(database: Database, seconds: float, health: TaskHealth) -> None:
    """Fire due schedules every ``seconds`` until cancelled."""
    seen: datetime.datetime | None = None

    async def fire() -> None:
        nonlocal seen
        now = tables.now()
        if seen is None or now < seen - CLOCK_SET_BACK:
            await look_again(database, now)
        seen = now
        await fire_due(database, now)

    await repeat(fire, seconds, health)


async def look_again(database: Database, now: datetime.datetime) -> int:
    """Correct schedules at the start, and when the clock was set back; return how many were corrected.

    A schedule whose next firing was computed by a clock that ran ahead would otherwise sleep until then. A schedule
    never fires twice for the same time. Firings in the future that were recorded as missed are removed, since they were
    never missed.
    """
    table = tables.schedule
    ahead = sa.and_(table.c.paused.is_(False), table.c.next_fire_at > now)
    corrected = 0
    never_missed = sa.and_(tables.firing.c.outcome == "missed", tables.firing.c.fire_at_utc > now)
    async with database.write() as connection:
        await connection.execute(tables.firing.delete().where(never_missed))
        for row in await all_rows(connection, ScheduleRow, sa.select(table).where(ahead).with_for_update()):
            try:
                following = cron.next_firing(row["cron"], row["timezone"], now)
            except ValueError:
                continue  # reported when the schedule is due
            assert row["next_fire_at"] is not None  # selected by it
            if following is not None and following < row["next_fire_at"]:
                corrected += 1
                changed = table.update().where(table.c.id == row["id"]).values(next_fire_at=following)
                await connection.execute(changed)
                log.warning("schedule %s: fires next at %s, not at %s", row["name"], following, row["next_fire_at"])
    return corrected


async def fire_due(database: Database, now: datetime.datetime) -> int:
    """Fire every schedule that is due and return the number of jobs started.

    Each schedule has its own transaction: firings, their jobs and ``next_fire_at`` move together.

    Raises:
        Exception: The first error of a schedule that cannot be fired, raised after the others have fired.
    """
    table = tables.schedule
    due = sa.and_(table.c.paused.is_(False), table.c.next_fire_at <= now)
    async with database.read() as connection:
        names = sa.select(table.c.id, table.c.name).where(due).order_by(table.c.next_fire_at)
        schedules = (await connection.execute(names)).all()
    started = 0
    failures = []
    for schedule_id, name in schedules:
        try:
            started += await _fire_one(database, schedule_id, now)
        except Exception as failure:  # an error in one schedule must not delay the others
            failure.add_note(f"while firing schedule '{name}' ({schedule_id})")
            failures.append(failure)
    if failures:
        raise failures[0]
    return started


async def _fire_one(database: Database, schedule_id: str, now: datetime.datetime) -> int:
    table = tables.schedule
    still_due = sa.and_(table.c.id == schedule_id, table.c.paused.is_(False), table.c.next_fire_at <= now)
    async with database.write() as connection:
        query = sa.select(table).where(still_due).with_for_update(skip_locked=True)
        row = await first_row(connection, ScheduleRow, query)
        if row is None:
            return 0
        assert row["next_fire_at"] is not None  # selected by it
        plan = cron.plan(
            row["cron"], row["timezone"], row["next_fire_at"], now, row["catchup"], row["misfire_grace_seconds"]
        )
        fired = await schedule_records.fire_planned(connection, row, plan.due)
        changed = table.update().where(table.c.id == schedule_id).values(next_fire_at=plan.next_fire_at)
        await connection.execute(changed)
    return sum(firing["outcome"] == "started" for firing in fired)
