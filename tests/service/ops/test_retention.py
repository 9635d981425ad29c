"""What is old goes, once a day, by one of several processes; and never what something could still start from."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from embeddings.object_storage import ObjectStorage
from embeddings.store import StoreError
from service.core import tables
from service.core.database import Database
from service.core.settings import RetentionDays, Settings
from service.identity import idempotency
from service.jobs import job_records
from service.jobs.stored_runs import remove_run
from service.ops import retention
from service.ops.retention import Swept
from tests.service import published
from tests.service.service_kit import BOTH, client_of, job_body, running, until, waits_for
from trainer.runs.directory import DATA_PARTS
from trainer.spec import JobSpec
from trainer.storage.shared_directory import SharedDirectory
from trainer.storage.storage_registry import open_storage

pytestmark = [pytest.mark.anyio, BOTH]

DAY = datetime.timedelta(days=1)
LOOK = datetime.timedelta(seconds=retention.LOOK_SECONDS)
HOME = "home_of_this_test"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return dataclasses.replace(
        settings, retention=RetentionDays(jobs=100, logs=50, checkpoints=20, events=10, firings=60)
    )


async def ended(app: FastAPI, client: httpx.AsyncClient, days_ago: float, **fields: Any) -> str:
    """A job that ran under this home, left its files, and ended so long ago."""
    job_id = (await client.post("/v1/jobs", json=job_body(**fields))).json()["id"]
    settings: Settings = app.state.settings
    (settings.home / "home.id").write_text(HOME)
    directory = settings.run_dir(job_id)
    for name in ("checkpoints", "data"):
        (directory / name).mkdir(parents=True)
        (directory / name / "file").write_bytes(b"x" * 1000)
    (directory / "log.txt").write_bytes(b"x" * 10)
    done = {"state": "succeeded", "finished_at": tables.now() - days_ago * DAY, "home_id": HOME, "released": True}
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().where(tables.job.c.id == job_id).values(done))
        for kind in ("progress", "state"):
            await connection.execute(tables.job_event.insert().values(job_id=job_id, type=kind, data={}))
    return job_id


def left(app: FastAPI, job_id: str) -> set[str]:
    directory: Path = app.state.settings.run_dir(job_id)
    return {one.name for one in directory.iterdir()} if directory.exists() else set()


async def sweep(app: FastAPI, dry_run: bool = False) -> Swept:
    return await retention.sweep(app.state.database, app.state.settings, app.state.store, tables.now(), dry_run)


async def test_what_an_ended_job_left_goes_by_age(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    everything = {"checkpoints", "data", "log.txt"}
    ran = {days: await ended(app, client, days) for days in (1, 11, 21, 51, 101)}
    told = await sweep(app, dry_run=True)
    assert told == Swept(jobs=1, checkpoints=2, logs=1, events=4, bytes=3 * 2000 + 2 * 10)
    assert all(left(app, job) == everything for job in ran.values()), "a dry run removes nothing"
    assert (await sweep(app))[:3] == told[:3]
    found = {days: left(app, job) for days, job in ran.items()}
    assert found == {1: everything, 11: everything, 21: {"log.txt"}, 51: set(), 101: set()}
    shown = {days: (await client.get(f"/v1/jobs/{job}")).status_code for days, job in ran.items()}
    assert shown == {1: 200, 11: 200, 21: 200, 51: 200, 101: 404}
    assert (await client.get(f"/v1/jobs/{ran[51]}/logs")).text == ""
    async with app.state.database.read() as connection:
        counted = sa.select(tables.job_event.c.type, sa.func.count()).group_by(tables.job_event.c.type)
        events = {row[0]: row[1] for row in await connection.execute(counted)}
    assert events == {"progress": 1, "state": 4 * 2}, "how jobs went stays with them"
    assert await sweep(app) == Swept()
    assert not list(app.state.settings.runs.glob(".deleted*"))


async def test_what_a_preparation_that_failed_has_read_goes_with_the_data(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    job_id = await ended(app, client, 21)
    (app.state.settings.run_dir(job_id) / DATA_PARTS).mkdir()
    await sweep(app)
    assert left(app, job_id) == {"log.txt"}


async def test_what_lies_in_a_run_storage_goes_too(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, tmp_path: Path
) -> None:
    storage = open_storage((tmp_path / "there").as_uri())
    (tmp_path / "file").write_bytes(b"x" * 500)
    ran = {days: await ended(app, client, days) for days in (11, 21, 101)}
    for job_id in ran.values():
        directory = app.state.settings.run_dir(job_id)
        (directory / "run.json").write_text(json.dumps({"storage": f"{storage.uri}/{job_id}"}))
        for name in ("checkpoints/files/a", "data/b.json"):
            storage.put_file(f"{job_id}/{name}", tmp_path / "file")
    shutil.rmtree(app.state.settings.run_dir(ran[21]) / "data")  # a host may have none of it
    whole = sum(one.stat().st_size for one in app.state.settings.run_dir(ran[101]).rglob("*") if one.is_file())
    told = await sweep(app, dry_run=True)
    assert (told.jobs, told.checkpoints, told.bytes - whole) == (1, 1, 1000 + 500 + 500)
    await sweep(app)
    assert {one.name.partition("/")[0] for one in storage.list("")} == {ran[11]}
    assert await sweep(app) == Swept()


async def test_a_run_whose_storage_is_away_is_removed_when_it_is_back(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, tmp_path: Path
) -> None:
    job_id = await ended(app, client, 101)
    storage = SharedDirectory(tmp_path / "there")
    (tmp_path / "file").write_bytes(b"x")
    storage.put_file(f"{job_id}/data/file", tmp_path / "file")
    run_file = app.state.settings.run_dir(job_id) / "run.json"
    run_file.write_text(json.dumps({"storage": "s3://runs/away"}))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        environment.setitem(ObjectStorage.__init__.__kwdefaults__, "retries", 0)
        await sweep(app)
    (kept,) = app.state.settings.runs.glob(".deleted*")
    (kept / "run.json").write_text(json.dumps({"storage": f"{storage.uri}/{job_id}"}))
    remove_run(kept)
    assert storage.list("") == []
    assert not kept.exists()


@pytest.mark.parametrize("change", [{"home_id": "home_elsewhere"}, {"released": False}])
async def test_what_is_another_homes_or_still_has_processes_stays(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, change: dict[str, Any]
) -> None:
    ran = [await ended(app, client, days) for days in (60, 500)]
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().values(change))
    swept = await sweep(app)
    assert (swept.jobs, swept.checkpoints, swept.logs) == (0, 0, 0)
    for job in ran:
        assert left(app, job) == {"checkpoints", "data", "log.txt"}
        assert (await client.get(f"/v1/jobs/{job}")).status_code == 200


async def test_a_checkpoint_stays_while_something_could_start_from_it(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    served, superseded, named, scheduled, begun, free = [await ended(app, client, 200) for _ in range(6)]
    for job in (superseded, served):
        published.publish(app.state.settings, job=job)
    await client.post("/v1/jobs", json=job_body(init_from={"job": named}))
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body(init_from={"job": scheduled})}
    assert (await client.post("/v1/schedules", json=body)).status_code == 201
    # A run that began from "current" before another version was: its run.json says from what.
    running_job = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    directory = app.state.settings.run_dir(running_job)
    directory.mkdir()
    start = {"init_checkpoint": str(app.state.settings.run_dir(begun) / "checkpoints")}
    (directory / "run.json").write_text(json.dumps(start))
    swept = await sweep(app)
    assert swept.jobs == 1
    assert all("checkpoints" in left(app, job) for job in (served, superseded, named, scheduled, begun))
    assert left(app, free) == set()
    # What can no longer be started from goes with the next sweep.
    await client.delete("/v1/schedules/daily")
    assert (await sweep(app)).jobs == 1
    assert left(app, scheduled) == set()


@pytest.mark.parametrize("what", ["checkpoints", "job"])
async def test_a_job_that_is_named_while_the_sweep_is_under_way_stays(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Submitted once the sweep has read what is needed, and before it removes anything."""
    old = await ended(app, client, 21 if what == "checkpoints" else 101)
    needed_jobs = retention.needed_jobs

    async def and_then_one_is_submitted(*arguments: Any) -> set[str]:
        found = await needed_jobs(*arguments)
        assert (await client.post("/v1/jobs", json=job_body(init_from={"job": old}))).status_code == 202
        return found

    monkeypatch.setattr(retention, "needed_jobs", and_then_one_is_submitted)
    await sweep(app)
    assert "checkpoints" in left(app, old)
    assert (await client.get(f"/v1/jobs/{old}")).status_code == 200


async def test_who_names_a_job_holds_it_until_that_is_known(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    """The sweep waits for a submission that is under way, and sees it then."""
    old = await ended(app, client, 101)
    database: Database = app.state.database
    spec = JobSpec.model_validate(job_body(init_from={"job": old}))
    async with database.write() as connection:
        spec, dataset_spec = await job_records.check(connection, spec, "default")
        sweeping = asyncio.create_task(sweep(app))

        async def waits() -> bool:
            if database.is_sqlite:
                return bool(getattr(database._writers, "_waiters", None))
            return await waits_for(database, connection)

        await until(waits)
        await job_records.create(connection, spec, dataset_spec, "default")
    assert (await sweeping).jobs == 0
    assert "checkpoints" in left(app, old)


async def test_what_is_behind_versions_of_a_tenant_without_a_key_stays(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    served = await ended(app, client, 200)
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().where(tables.job.c.id == served).values(tenant="ads"))
    published.publish(app.state.settings.for_tenant("ads"), job=served)
    assert (await sweep(app)).jobs == 0
    assert "checkpoints" in left(app, served)


async def test_nothing_goes_while_a_collection_cannot_be_read(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    job = await ended(app, client, 200)
    version, _ = published.publish(app.state.settings, job=job)
    (manifest,) = Path(app.state.settings.store_url).rglob(f"{version}/manifest.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError):
        await sweep(app)
    manifest.write_bytes(whole)
    await sweep(app)
    assert "checkpoints" in left(app, job)


async def test_rows_without_a_home_go_by_age(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body()}
    assert (await client.post("/v1/schedules", json=body)).status_code == 201
    now = tables.now()
    async with app.state.database.write() as connection:
        schedule = await connection.scalar(sa.select(tables.schedule.c.id))
        key = await connection.scalar(sa.select(tables.api_key.c.id))
        for days in (1, 59, 61):
            row = {"schedule_id": schedule, "fire_at_utc": now - days * DAY, "kind": "cron", "outcome": "missed"}
            row |= {"firing_date": "2026-01-01", "created_at": now}
            await connection.execute(tables.firing.insert().values(row))
        for number, age in enumerate((idempotency.KEPT / 2, idempotency.KEPT * 2)):
            row = {"key_id": key, "key": str(number), "body_hash": "", "token": "", "created_at": now - age}
            await connection.execute(tables.idempotency.insert().values(row))
            row = {"hash": str(number), "key_id": key, "created_at": now, "expires_at": now + (1 - 2 * number) * DAY}
            await connection.execute(tables.session.insert().values(row))
    assert await sweep(app) == Swept(firings=1, idempotency_keys=1, sessions=1)
    assert len((await client.get("/v1/schedules/daily/firings")).json()["items"]) == 2


async def test_one_of_several_takes_the_day(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    await ended(app, client, 200)
    replicas = [Database(app.state.settings.database_url) for _ in range(5)]
    arguments = (app.state.settings, app.state.store)
    now = tables.now()
    swept = await asyncio.gather(*(retention.sweep_if_due(one, *arguments, now) for one in replicas))
    assert sum(one.jobs for one in swept if one is not None) == 1
    later = [now + datetime.timedelta(hours=23), now + DAY, now + DAY]
    found = [await retention.sweep_if_due(replicas[0], *arguments, at) is not None for at in later]
    assert found == [False, True, False]
    # A clock that was ahead when it swept does not end sweeping.
    await retention.sweep_if_due(replicas[0], *arguments, now + 400 * DAY)
    assert await retention.sweep_if_due(replicas[1], *arguments, now + 2 * DAY) is not None
    for one in replicas:
        await one.stop()


async def test_a_sweep_that_fails_is_due_again_on_the_same_day(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    job = await ended(app, client, 200)
    version, _ = published.publish(app.state.settings)
    (manifest,) = Path(app.state.settings.store_url).rglob(f"{version}/manifest.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: len(whole) // 2])
    arguments = (app.state.database, app.state.settings, app.state.store)
    now = tables.now()
    with pytest.raises(StoreError):
        await retention.sweep_if_due(*arguments, now)
    manifest.write_bytes(whole)
    assert await retention.sweep_if_due(*arguments, now + LOOK) is None, "not every minute"
    assert "checkpoints" in left(app, job)
    swept = await retention.sweep_if_due(*arguments, now + retention.AGAIN)
    assert swept is not None
    assert swept.jobs == 1
    assert await retention.sweep_if_due(*arguments, now + 3 * retention.AGAIN) is None


async def test_a_running_service_sweeps(settings: Settings, dataset_body: dict[str, Any]) -> None:
    async with running(settings) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            job = await ended(app, client, 200)
    async with running(dataclasses.replace(settings, role="scheduler")) as app:

        async def gone() -> bool:
            return not settings.run_dir(job).exists()

        await until(gone)
