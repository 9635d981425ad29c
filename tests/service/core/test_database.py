"""No update is lost, migrations match the tables, and processes that start together do not step on each other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from service.core import tables
from service.core.database import MIGRATIONS, Database, migrate
from service.core.settings import Settings
from service.identity import keys
from tests.service.racers import COUNTER, add_in_process
from tests.service.service_kit import BOTH
from tests.support import forked

pytestmark = [pytest.mark.anyio, BOTH]


@pytest.fixture
def migrated() -> bool:
    return False


async def prepare_counter(database: Database) -> None:
    row = {"name": COUNTER, "spec": {"count": 0}, "created_at": tables.now()}
    async with database.write() as connection:
        await connection.execute(tables.dataset.insert().values(row))


async def count(database: Database) -> int:
    async with database.read() as connection:
        spec = await connection.scalar(sa.select(tables.dataset.c.spec).where(tables.dataset.c.name == COUNTER))
    return int(spec["count"])


@pytest.mark.process
async def test_no_update_is_lost_among_12_writers_in_3_processes(database_url: str, tmp_path: Path) -> None:
    database = Database(database_url)
    await database.start()
    await prepare_counter(database)
    barrier, log = forked.barrier(3), tmp_path / "writers.txt"
    workers = [forked.start(add_in_process, database_url, barrier, 4, 20, log=log) for _ in range(3)]
    await asyncio.to_thread(lambda: [worker.join(240) for worker in workers])
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert await count(database) == 3 * 4 * 20
    await database.stop()


async def test_a_failed_write_leaves_nothing(database_url: str) -> None:
    database = Database(database_url)
    await database.start()

    async def fail_after_writing() -> None:
        async with database.write() as connection:
            await connection.execute(tables.dataset.insert().values(name="a", spec={}, created_at=tables.now()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_after_writing()
    async with database.read() as connection:
        assert await connection.scalar(sa.select(sa.func.count()).select_from(tables.dataset)) == 0
    await database.stop()


async def test_migrations_make_the_tables_and_go_back(database_url: str) -> None:
    database = Database(database_url)
    await database.start()

    def difference(connection: sa.Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, tables.metadata))

    async with database.read() as connection:
        assert await connection.run_sync(difference) == []
    async with database.write() as connection:
        await connection.run_sync(migrate, "base")
    async with database.read() as connection:
        left = await connection.run_sync(lambda raw: sa.inspect(raw).get_table_names())
        assert left == ["alembic_version"]
    await database.start()
    async with database.read() as connection:
        assert await connection.run_sync(difference) == []
    await database.stop()


async def test_every_revision_goes_up_and_down_with_rows_in_the_tables(settings: Settings) -> None:
    """One revision at a time. What was there in the first schema is there after going down to it and up again."""
    database = Database(settings.database_url)
    await database.start()
    key = await keys.create_first(database, settings)
    assert key is not None
    now = tables.now()
    async with database.write() as connection:
        await connection.execute(tables.dataset.insert().values(name="clicks", spec={"a": [1]}, created_at=now))
        job = {"id": "job_1", "name": "small", "state": "succeeded", "spec": {}, "dataset_spec": {}, "created_at": now}
        job |= {"attempt": 1, "failures": 0, "released": True, "events_offset": 7, "progress": {"step": 3}}
        await connection.execute(tables.job.insert().values(job))
        await connection.execute(tables.job_label.insert().values(job_id="job_1", key="team", value="ads"))
        metric = {"job_id": "job_1", "epoch": 1, "split": "test", "values": {"auc": 0.7}}
        await connection.execute(tables.job_metric.insert().values(metric))
        schedule = {"id": "schedule_1", "name": "daily", "cron": "0 3 * * *", "timezone": "UTC", "job": {}}
        schedule |= {"catchup": "none", "misfire_grace_seconds": 1.5, "overlap": "forbid", "paused": False}
        await connection.execute(tables.schedule.insert().values(created_at=now, next_fire_at=now, **schedule))
        firing = {"schedule_id": "schedule_1", "fire_at_utc": now, "kind": "cron", "outcome": "started"}
        firing |= {"firing_date": "2026-01-01", "job_id": "job_1", "created_at": now}
        await connection.execute(tables.firing.insert().values(firing))
        await connection.execute(tables.sweep.insert().values(name="rows", began_at=now))
    held = (tables.dataset, tables.job, tables.job_label, tables.job_metric, tables.schedule, tables.firing)

    async def rows() -> list[Any]:
        async with database.read() as connection:
            return [dict(row) for table in held for row in (await connection.execute(sa.select(table))).mappings()]

    before = await rows()
    versions = sorted(path.stem[:4] for path in (MIGRATIONS / "versions").glob("0*.py"))
    for revision in reversed(versions[:-1]):
        async with database.write() as connection:
            await connection.run_sync(migrate, revision)
    async with database.read() as connection:
        assert await connection.scalar(sa.text("SELECT count(*) FROM firing")) == 1
    for revision in versions[1:]:
        async with database.write() as connection:
            await connection.run_sync(migrate, revision)
    # Going down leaves what going up wrote: the decay that these jobs have had by default.
    for row in before:
        column = "spec" if "dataset_spec" in row else "job" if "cron" in row else None
        if column is not None:
            row[column] = {"optimizer": {"decay": "at_read"}}
    assert await rows() == before
    async with database.read() as connection:
        assert await keys.find(connection, key) is not None
    await database.stop()


async def test_a_database_of_a_newer_version_is_refused(database_url: str) -> None:
    database = Database(database_url)
    await database.start()
    async with database.write() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = 'f00d'"))
    with pytest.raises(RuntimeError, match=r"revision f00d.*newer"):
        await database.start()
    await database.stop()


async def test_five_starts_at_once_make_one_schema_and_one_key(settings: Settings) -> None:
    databases = [Database(settings.database_url) for _ in range(5)]

    async def start(database: Database) -> str | None:
        await database.start()
        return await keys.create_first(database, settings)

    made = [key for key in await asyncio.gather(*(start(database) for database in databases)) if key]
    assert len(made) == 1
    assert settings.admin_key_file.read_text().strip() == made[0]
    async with databases[0].read() as connection:
        assert await connection.scalar(sa.select(sa.func.count()).select_from(tables.api_key)) == 1
        principal = await keys.find(connection, made[0])
    assert principal is not None
    assert principal.scopes == ("admin",)
    for database in databases:
        await database.stop()


async def test_times_keep_their_instant(database_url: str) -> None:
    database = Database(database_url)
    await database.start()
    at = tables.now()
    async with database.write() as connection:
        await connection.execute(tables.dataset.insert().values(name="a", spec={}, created_at=at))
    async with database.read() as connection:
        assert await connection.scalar(sa.select(tables.dataset.c.created_at)) == at
    await database.stop()


async def test_a_url_may_leave_the_driver_out(database_url: str) -> None:
    database = Database(database_url.replace("+asyncpg", "").replace("+aiosqlite", ""))
    await database.start()
    await prepare_counter(database)
    assert await count(database) == 0
    await database.stop()
