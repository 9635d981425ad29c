"""No update is lost, migrations match the tables, and processes that start together do not step on each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from service.core import tables
from service.core.database import Database
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


async def test_migrations_make_the_tables(database_url: str) -> None:
    database = Database(database_url)
    await database.start()

    def difference(connection: sa.Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, tables.metadata))

    async with database.read() as connection:
        assert await connection.run_sync(difference) == []
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
