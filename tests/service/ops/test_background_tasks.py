"""What happens while nobody looks: directories removed, runs that say nothing, clocks set back, damaged databases."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from service.core.task_health import LOG_AGAIN_SECONDS, SILENT_SECONDS, TROUBLE_SECONDS, TaskHealth
from service.jobs.runner import STANDBY
from service.schedules import scheduler
from tests.service.service_kit import client_of, job_body, running, submit, until, wait_for
from tests.service.small_run import SmallRuns
from trainer.runs.protocol import PROCESS_FILE
from trainer.runs.run_process import processes

pytestmark = pytest.mark.anyio


async def test_a_removed_run_directory_leaves_no_orphan(service: httpx.AsyncClient, settings: Settings) -> None:
    job = (await submit(service, "told", epochs=100, retries=1))["id"]
    directory = settings.run_dir(job)
    await until(lambda: _progressed(service, job))
    before = {process.pid for process in processes(directory)}
    shutil.rmtree(directory)
    again = await until(lambda: _attempt(service, job, 2))
    assert [pid for pid in before if not await _gone(pid)] == []
    assert again["error"] is None
    # The second attempt's events are read from the beginning of its own file.
    await until(lambda: _progressed(service, job))
    (directory / "finish").touch()
    done = await wait_for(service, job, "succeeded", "failed")
    assert (done["state"], done["attempt"]) == ("succeeded", 2)


async def test_a_removed_run_directory_is_said_so(service: httpx.AsyncClient, settings: Settings) -> None:
    job = (await submit(service, "hang", retries=0))["id"]
    await until(lambda: _progressed(service, job))
    shutil.rmtree(settings.run_dir(job))
    done = await wait_for(service, job, "failed")
    assert done["error"]["code"] == "run-directory-gone"
    assert str(settings.run_dir(job)) in done["error"]["message"]


@pytest.mark.parametrize("grace_seconds", [0.3])
async def test_a_cancelled_job_without_its_directory_ends(service: httpx.AsyncClient, settings: Settings) -> None:
    job = (await submit(service, "stubborn"))["id"]
    await until(lambda: _progressed(service, job))
    (pid,) = {process.pid for process in processes(settings.run_dir(job))}
    await service.post(f"/v1/jobs/{job}/cancel")
    shutil.rmtree(settings.run_dir(job))
    await wait_for(service, job, "cancelled")
    await until(lambda: _gone(pid))


async def test_a_stale_process_file_whose_pid_was_reused(service: httpx.AsyncClient, settings: Settings) -> None:
    job = (await submit(service, "hang", retries=1))["id"]
    await until(lambda: _progressed(service, job))
    (pid,) = {process.pid for process in processes(settings.run_dir(job))}
    path = settings.run_dir(job) / PROCESS_FILE
    # Our own pid, created at another time: a stranger that has the number now.
    path.write_text(f'{{"pid": {os.getpid()}, "start_ticks": 1, "boot_id": "of another day"}}')
    os.kill(pid, signal.SIGKILL)
    await until(lambda: _attempt(service, job, 2))
    # A run that is told to end before it listens is waited for, as long as the grace is.
    await wait_for(service, job, "running")
    await service.post(f"/v1/jobs/{job}/cancel")
    await wait_for(service, job, "cancelled")


async def test_two_services_on_one_home_say_who_runs_the_jobs(
    settings: Settings, runs: SmallRuns, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dataclasses.replace(settings, role="all")
    async with running(settings, executor=runs) as first, running(settings, executor=runs) as second:
        async with client_of(first) as one, client_of(second) as two:

            async def standing_by() -> Any:
                return (await two.get("/readyz")).json()["checks"]["runner"] == STANDBY

            await until(standing_by)
            assert (await one.get("/readyz")).json()["checks"]["runner"] == "ok"
    said = [record for record in caplog.records if STANDBY in record.getMessage()]
    assert len(said) == 1


async def test_a_clock_that_ran_ahead_does_not_silence_a_schedule(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    for name, paused in (("daily", False), ("paused", True)):
        body = {"name": name, "cron": "0 3 * * *", "job": job_body(), "paused": paused}
        assert (await client.post("/v1/schedules", json=body)).status_code == 201
    now = datetime.datetime(2026, 3, 1, 2, 0, tzinfo=datetime.UTC)
    years_ahead = now.replace(year=2031)
    async with app.state.database.write() as connection:
        changed = tables.schedule.update().where(tables.schedule.c.name == "daily").values(next_fire_at=years_ahead)
        await connection.execute(changed)
    assert await scheduler.look_again(app.state.database, now) == 1
    assert (await client.get("/v1/schedules/daily")).json()["next_fire_at"] == "2026-03-01T03:00:00Z"
    assert await scheduler.look_again(app.state.database, now) == 0
    assert await scheduler.fire_due(app.state.database, now.replace(hour=3)) == 1
    # Set back once more: what has fired is looked at, and does not fire again.
    assert await scheduler.look_again(app.state.database, now) == 1
    assert await scheduler.fire_due(app.state.database, now.replace(hour=3)) == 0


async def test_what_a_clock_that_ran_ahead_noted_as_missed_still_fires(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body(), "overlap": "queue"}
    assert (await client.post("/v1/schedules", json=body)).status_code == 201
    right = datetime.datetime(2026, 3, 1, 3, 0, 1, tzinfo=datetime.UTC)
    async with app.state.database.write() as connection:
        await connection.execute(tables.schedule.update().values(next_fire_at=right.replace(second=0)))
    database = app.state.database
    assert await scheduler.fire_due(database, right) == 1
    day = datetime.timedelta(days=1)
    # For a moment it is ten days later and past the grace: nine are noted as missed, and so is the tenth.
    assert await scheduler.fire_due(database, right + 10 * day + day / 2) == 0
    await scheduler.look_again(database, right + day / 2)
    for later in range(1, 11):
        assert await scheduler.fire_due(database, right + later * day) == 1, later
    firings = (await client.get("/v1/schedules/daily/firings")).json()["items"]
    assert [one["outcome"] for one in firings] == ["started"] * 11


async def test_a_clock_that_ran_ahead_does_not_hold_a_retry_back(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        await client.post("/v1/datasets", json=dataset_body)
        job = (await submit(client, "succeed"))["id"]
        async with app.state.database.write() as connection:
            ahead = tables.now() + datetime.timedelta(days=2000)
            await connection.execute(tables.job.update().values(not_before=ahead))
    settings = dataclasses.replace(settings, role="all")
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await wait_for(client, job, "succeeded")


async def test_the_scheduler_looks_again_when_it_starts(settings: Settings, dataset_body: dict[str, Any]) -> None:
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        await client.post("/v1/datasets", json=dataset_body)
        body = {"name": "daily", "cron": "0 3 * * *", "job": job_body()}
        right = (await client.post("/v1/schedules", json=body)).json()["next_fire_at"]
        async with app.state.database.write() as connection:
            ahead = tables.now() + datetime.timedelta(days=2000)
            await connection.execute(tables.schedule.update().values(next_fire_at=ahead))
    settings = dataclasses.replace(settings, role="all")
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:

        async def corrected() -> Any:
            return (await client.get("/v1/schedules/daily")).json()["next_fire_at"] == right

        await until(corrected)


async def test_a_damaged_database_is_said_so(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    assert (await client.get("/v1/jobs")).status_code == 200
    path = Path(app.state.database.url.database)
    await app.state.database.stop()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\x55" * (path.stat().st_size - 4096))
    answer = await client.get("/v1/jobs")
    assert answer.status_code == 503, answer.text
    assert answer.json()["type"] == "urn:evenkeel:database-damaged"
    assert "backup" in answer.json()["errors"][0]["remedy"]


async def test_a_failing_runner_is_told_and_leaves_the_rest_in_service(app: FastAPI, client: httpx.AsyncClient) -> None:
    clock = Clock()
    runner, scheduling = TaskHealth("runner", clock), TaskHealth("scheduler", clock)
    app.state.task_health = (runner, scheduling)
    runner.failed(OSError("no space left"))
    clock.now += 30
    scheduling.good()
    ready = await client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["status"] == "degraded"
    assert ready.json()["checks"]["runner"] == "has been failing for 30 s: OSError: no space left"
    assert ready.json()["checks"]["scheduler"] == "ok"
    runner.good()
    assert (await client.get("/readyz")).json()["status"] == "ok"


# --- task health -------------------------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_task_health_tells_trouble_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    health = TaskHealth("runner", clock)
    assert health.verdict() == (True, "ok")
    for _ in range(200):
        clock.now += 1
        try:
            raise OSError("no space left")
        except OSError as error:
            health.failed(error)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info
    assert health.verdict() == (False, "has been failing for 199 s: OSError: no space left")
    clock.now += LOG_AGAIN_SECONDS
    health.failed(OSError("no space left"))
    health.failed(OSError("something else"))
    assert len(caplog.records) == 3
    caplog.set_level(logging.WARNING)
    health.good()
    assert "works again" in caplog.records[-1].getMessage()
    assert health.verdict() == (True, "ok")


def test_task_health_forgives_a_moment_and_notices_silence() -> None:
    clock = Clock()
    health = TaskHealth("scheduler", clock)
    health.failed(OSError("busy"))
    clock.now += TROUBLE_SECONDS - 1
    assert health.verdict()[0]
    health.good()
    clock.now += SILENT_SECONDS
    assert health.verdict() == (False, f"has not completed a round for {SILENT_SECONDS:.0f} s")


# --- looks -----------------------------------------------------------------------------------------------------------


async def _progressed(client: httpx.AsyncClient, job: str) -> Any:
    shown = (await client.get(f"/v1/jobs/{job}")).json()
    return shown if shown["state"] == "running" and shown["progress"] else None


async def _attempt(client: httpx.AsyncClient, job: str, attempt: int) -> Any:
    shown = (await client.get(f"/v1/jobs/{job}")).json()
    return shown if shown["attempt"] == attempt and shown["state"] in ("starting", "running") else None


async def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
