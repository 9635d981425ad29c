"""A database of an older revision is upgraded by the service's start, and all that is in it is read through the API.
One of a newer version is refused, and stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from service import app as application
from service.core.database import Database, migrate
from service.core.settings import Settings
from tests.service.core import older_rows
from tests.service.service_kit import BOTH, client_of, running
from tests.service.serving import Run, command_in_this_process

pytestmark = pytest.mark.anyio
NEWER = "UPDATE alembic_version SET version_num = '0099'"


@pytest.fixture
def migrated() -> bool:
    return False


@pytest.fixture
def run(settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("EVENKEEL_HOME", str(settings.home))
    monkeypatch.delenv("EVENKEEL_DATABASE_URL", raising=False)
    return command_in_this_process(monkeypatch, capsys)


async def write(settings: Settings, revision: str, statements: Sequence[str] = ()) -> None:
    """Upgrades a database to a revision, and writes rows there."""
    database = Database(settings.database_url)
    settings.home.mkdir(exist_ok=True)
    async with database.write() as connection:
        await connection.run_sync(migrate, revision)
        for statement in statements:
            # Not sa.text, which takes the colons of JSON for parameters.
            await connection.exec_driver_sql(statement)
    await database.stop()


@BOTH
@pytest.mark.filterwarnings("ignore:compass is now frozen_context")  # a job is made of what was stored
async def test_all_that_is_in_an_older_database_is_read_through_the_api(settings: Settings, backend: str) -> None:
    await write(settings, older_rows.FIRST, older_rows.of_each_table(postgres=backend == "postgresql"))
    async with running(settings) as app, client_of(app, older_rows.KEY) as client:
        assert not settings.admin_key_file.exists(), "the key of before is the admin's"

        async def get(path: str) -> Any:
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            return answer.json()

        assert [key["id"] for key in (await get("/v1/keys"))["items"]] == ["key_1"]
        assert (await get("/v1/datasets/clicks"))["features"]["user"]["type"] == "id"
        assert [job["id"] for job in (await get("/v1/jobs?label=team=ads"))["items"]] == ["job_1"]
        job = await get("/v1/jobs/job_1")
        assert job["state"] == "succeeded"
        assert job["created_at"] == "2026-11-20T03:00:00Z"
        assert job["metrics"][0]["auc"] == 0.75
        # Left out then, for its default; of another default now, it must stand there.
        optimizer = {"kind": "adam_ar", "alpha": "default", "decay": "at_read"}
        assert job["spec"] == older_rows.JOB | {"optimizer": optimizer}
        schedule = await get("/v1/schedules/nightly")
        assert schedule["paused"]
        assert schedule["job"]["optimizer"] == optimizer
        assert [firing["job_id"] for firing in (await get("/v1/schedules/nightly/firings"))["items"]] == ["job_1"]
        assert [entry["action"] for entry in (await get("/v1/audit"))["items"]][-1] == "job.create"
        assert [hook["id"] for hook in (await get("/v1/webhooks"))["items"]] == ["webhook_1"]
        deliveries = await get("/v1/webhooks/webhook_1/deliveries")
        assert [one["id"] for one in deliveries["items"]] == ["delivery_1"]
        fired = await client.post("/v1/schedules/nightly/trigger")
        assert fired.status_code == 202, fired.text
        made = await get(f"/v1/jobs/{fired.json()['job_id']}")
        assert made["spec"]["publish"]["frozen_context"] == {"items": "warm"}
        assert "calibrate" not in made["spec"]["publish"]["gate"]
        assert made["spec"]["optimizer"]["decay"] == "at_read"


async def test_the_service_does_not_start_on_a_newer_database(settings: Settings) -> None:
    await write(settings, "head", [NEWER])
    reason = await application._reason_not_to_start(settings)
    assert reason is not None
    assert "revision 0099, which this version of Evenkeel does not know: it was written by a newer one" in reason
    assert reason.endswith("install that version, or restore an earlier backup")


async def test_the_service_does_not_start_on_a_database_of_before_the_first_release(settings: Settings) -> None:
    await write(settings, "head", [NEWER.replace("0099", "0005")])
    reason = await application._reason_not_to_start(settings)
    assert reason is not None
    assert reason.endswith("revision 0005, of a version before 0.1.0: upgrade it with 0.1.0 first")


@pytest.mark.parametrize("command", [("retention",), ("keys", "reset-admin")])
async def test_a_command_leaves_a_newer_database_as_it_is(
    settings: Settings, command: tuple[str, ...], run: Run
) -> None:
    """Retention would delete by what this version takes rows to mean."""
    await write(settings, "head", [*older_rows.of_each_table(postgres=False), NEWER])
    before = settings.home.joinpath("evenkeel.db").read_bytes()
    done = await asyncio.to_thread(run, *command)
    assert done.code == 1
    assert "written by a newer one; install that version, or restore an earlier backup" in done.err
    assert settings.home.joinpath("evenkeel.db").read_bytes() == before


async def test_retention_leaves_an_older_database_to_the_service(settings: Settings, run: Run) -> None:
    await write(settings, older_rows.FIRST, older_rows.of_each_table(postgres=False))
    done = await asyncio.to_thread(run, "retention")
    assert done.code == 1
    assert "revision 0008, this version of Evenkeel reads 0" in done.err
    assert "start the service, which upgrades it" in done.err
    await write(settings, "head")
    assert (await asyncio.to_thread(run, "retention")).code == 0
