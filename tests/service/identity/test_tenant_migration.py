"""A database from before there were tenants keeps all its rows, up and down."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from service.core import tables
from service.core.database import Database, migrate
from tests.service.service_kit import BOTH

pytestmark = [pytest.mark.anyio, BOTH]


@pytest.fixture
def migrated() -> bool:
    return False


NOW = tables.now()
TABLES = ("api_key", "session", "dataset", "job", "job_label", "job_event", "schedule", "firing")


def fill(connection: sa.Connection) -> None:
    """A row in every table that was there, as the earlier version wrote it."""

    def insert(name: str, /, **values: Any) -> None:
        table = sa.Table(name, sa.MetaData(), autoload_with=connection)
        types = {column.name: column.type for column in getattr(tables, name).columns}
        literal = {key: sa.bindparam(key, value, types[key]) for key, value in values.items()}
        connection.execute(table.insert().values(literal))

    insert("api_key", id="key_1", name="admin", prefix="aa", hash="h", scopes=["admin"], created_at=NOW)
    insert("session", hash="s", key_id="key_1", created_at=NOW, expires_at=NOW)
    insert("dataset", name="ratings", spec={"name": "ratings"}, created_at=NOW)
    insert(
        "job", id="job_1", name="small", state="succeeded", spec={}, dataset_spec={}, created_at=NOW, attempt=1,
        failures=0, released=True, events_offset=0,
    )  # fmt: skip
    insert("job_label", job_id="job_1", key="team", value="ads")
    insert("job_event", job_id="job_1", type="state", data={})
    insert(
        "schedule", id="schedule_1", name="daily", cron="0 3 * * *", timezone="UTC", job={}, catchup="none",
        misfire_grace_seconds=1.0, overlap="forbid", paused=False, created_at=NOW,
    )  # fmt: skip
    insert(
        "firing", schedule_id="schedule_1", fire_at_utc=NOW, kind="cron", outcome="started", firing_date="2026-11-20",
        created_at=NOW,
    )  # fmt: skip


def counts(connection: sa.Connection) -> dict[str, int]:
    return {name: connection.execute(sa.text(f"SELECT count(*) FROM {name}")).scalar_one() for name in TABLES}


async def test_rows_of_before_belong_to_the_default_tenant_and_none_is_lost(database_url: str) -> None:
    database = Database(database_url)
    await database.start()
    async with database.write() as connection:
        await connection.run_sync(migrate, "base")
    async with database.write() as connection:
        await connection.run_sync(migrate, "0001")
        await connection.run_sync(fill)
    await database.start()
    async with database.read() as connection:
        assert await connection.run_sync(counts) == dict.fromkeys(TABLES, 1)
        for table in (tables.api_key, tables.dataset, tables.job, tables.schedule):
            assert await connection.scalar(sa.select(table.c.tenant)) == tables.DEFAULT_TENANT
    async with database.write() as connection:
        await connection.run_sync(migrate, "0001")
        assert await connection.run_sync(counts) == dict.fromkeys(TABLES, 1)
    await database.start()
    row = {"name": "ratings", "spec": {}, "created_at": NOW}
    async with database.write() as connection:
        await connection.execute(tables.dataset.insert().values(tenant="ads", **row))  # the name is free there
    with pytest.raises(sa.exc.IntegrityError):
        async with database.write() as connection:
            await connection.execute(tables.dataset.insert().values(tenant="ads", **row))
    with pytest.raises(RuntimeError, match="tenant 'ads' has rows in dataset"):
        async with database.write() as connection:
            await connection.run_sync(migrate, "0001")
    await database.stop()
