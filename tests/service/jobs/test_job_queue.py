"""The queue with a runner and real processes: one run at a time, in order, by tenant, priority and schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from service.core.tenants import HEADER
from service.jobs import job_queue
from tests.service.service_kit import BOTH, client_of, job_body, running, submit, until, wait_for
from tests.service.small_run import SmallRuns
from trainer.spec import JobSpec

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@BOTH
async def test_one_run_at_a_time_and_the_others_say_why(service: httpx.AsyncClient) -> None:
    first = await submit(service, "hang")
    await wait_for(service, first["id"], "running")
    second, third = await submit(service, "succeed"), await submit(service, "succeed")

    async def reasons() -> Any:
        waiting = [(await service.get(f"/v1/jobs/{job['id']}")).json() for job in (second, third)]
        return waiting if all(job["reason"] for job in waiting) else None

    for job in await until(reasons):
        assert job["state"] == "queued"
        assert first["id"] in job["reason"]
    await service.post(f"/v1/jobs/{first['id']}/cancel")
    ended = [await wait_for(service, job["id"], "succeeded") for job in (second, third)]
    cancelled = await wait_for(service, first["id"], "cancelled")
    assert cancelled["finished_at"] < ended[0]["started_at"]
    assert ended[0]["finished_at"] < ended[1]["started_at"]
    assert ended[0]["reason"] is None


@BOTH
async def test_the_highest_priority_is_first_in_line(service: httpx.AsyncClient) -> None:
    first = await submit(service, "hang")
    await wait_for(service, first["id"], "running")
    waiting = [await submit(service, "succeed", priority=priority) for priority in (-1, 0, 5, 5)]
    assert waiting[2]["spec"]["priority"] == 5

    async def behind_the_highest() -> bool:
        told = [(await service.get(f"/v1/jobs/{job['id']}")).json()["reason"] or "" for job in waiting]
        behind = [f"after {waiting[2]['id']}, which is first in line" in one for one in told]
        return behind == [True, True, False, True]

    # A waiting job keeps the reason of the pass before until the next one: only what the passes settle on is asked for.
    await until(behind_the_highest)
    await service.post(f"/v1/jobs/{first['id']}/cancel")
    ended = [await wait_for(service, job["id"], "succeeded") for job in waiting]
    started = [job["started_at"] for job in ended]
    assert sorted(started) == [started[2], started[3], started[1], started[0]]


@BOTH
async def test_a_priority_is_read_under_its_old_name_too(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [(await submit(client, priority=priority))["id"] for priority in (0, 3, 5)]
    job = tables.job.c
    old = job_body() | {"urgency": 7}
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().where(job.id == jobs[2]).values(spec=old))
    for names, expected in (({}, [0, 3, 0]), ({"urgency": "priority"}, [0, 3, 7])):
        monkeypatch.setattr(JobSpec, "old_names", names)
        async with app.state.database.read() as connection:
            assert [*await connection.scalars(sa.select(job_queue.priority()).order_by(job.id))] == expected


@BOTH
async def test_a_priority_takes_no_turn_of_another_tenant(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, role="all", tenant_data_roots=(("ads", settings.data_roots[0]),))
    async with (
        running(settings, executor=runs) as app,
        client_of(app, settings.admin_key_file.read_text().strip()) as client,
    ):
        for tenant in ("default", "ads"):
            done = await client.post("/v1/datasets", json=dataset_body, headers={HEADER: tenant})
            assert done.status_code == 201
        first = await submit(client, "hang")
        await wait_for(client, first["id"], "running")
        theirs = await submit(client, "succeed", "ads")
        ours = [await submit(client, "succeed", priority=priority) for priority in (0, 100)]
        await client.post(f"/v1/jobs/{first['id']}/cancel")
        jobs = [theirs, *ours]
        started = [(await wait_for(client, job["id"], "succeeded"))["started_at"] for job in jobs]
        assert sorted(started) == [started[0], started[2], started[1]]


@BOTH
async def test_jobs_of_a_schedule_run_one_after_another(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    settings = dataclasses.replace(
        settings, role="all", max_runs=8, host_cores=64.0, host_memory_bytes=2**50, retry_backoff_seconds=3600.0
    )
    async with (
        running(settings, executor=runs) as app,
        client_of(app, settings.admin_key_file.read_text().strip()) as client,
    ):
        assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
        for name, behave in (("daily", "hang"), ("weekly", "hang"), ("hourly", "retryable")):
            body = {"name": name, "cron": "0 3 1 1 *", "overlap": "queue", "job": job_body(behave)}
            assert (await client.post("/v1/schedules", json=body)).status_code == 201

        async def fired(name: str) -> str:
            return str((await client.post(f"/v1/schedules/{name}/trigger")).json()["job_id"])

        async def told(job_id: str) -> str:
            job = (await client.get(f"/v1/jobs/{job_id}")).json()
            assert job["state"] == "queued"
            return str(job["reason"])

        first, second, third = [await fired("daily") for _ in range(3)]
        await wait_for(client, first, "running")
        # Neither another schedule nor a job without one is held up by those that wait.
        await wait_for(client, await fired("weekly"), "running")
        await wait_for(client, (await submit(client, "succeed"))["id"], "succeeded")
        await until(lambda: _says(told, second, f"after {first}, an older job of its schedule"))
        await until(lambda: _says(told, third, f"after {first}, an older job of its schedule"))
        await client.post(f"/v1/jobs/{first}/cancel")
        await wait_for(client, second, "running")
        await until(lambda: _says(told, third, f"after {second}, an older job of its schedule"))
        # One that waits for its backoff has not ended.
        failing, behind = await fired("hourly"), await fired("hourly")
        await until(lambda: _says(told, behind, f"after {failing}, an older job of its schedule"))
        await until(lambda: _is_in_backoff(client, failing))
        await wait_for(client, (await submit(client, "succeed"))["id"], "succeeded")
        assert f"after {failing}" in await told(behind)


async def _says(told: Callable[[str], Awaitable[str]], job_id: str, reason: str) -> bool:
    return reason in await told(job_id)


async def _is_in_backoff(client: httpx.AsyncClient, job_id: str) -> bool:
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    return job["state"] == "queued" and job["attempt"] == 1
