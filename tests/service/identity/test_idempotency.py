"""``Idempotency-Key`` on what moves and makes things: done once, answered alike, freed where it was refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.tenants import HEADER
from service.identity import idempotency
from service.jobs import job_records
from tests.service import published
from tests.service.service_kit import BOTH, job_body

pytestmark = [pytest.mark.anyio, BOTH]
ONCE = {"Idempotency-Key": "once"}


async def failed_job(app: FastAPI, client: httpx.AsyncClient) -> str:
    job = str((await client.post("/v1/jobs", json=job_body())).json()["id"])
    await fail(app, job)
    return job


async def fail(app: FastAPI, job: str) -> None:
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job)
        await job_records.change(connection, row, state="failed")


async def test_a_retry_is_done_once(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    job = await failed_job(app, client)
    path = f"/v1/jobs/{job}/retry"
    first = await client.post(path, headers=ONCE)
    assert (first.status_code, first.json()["state"]) == (202, "queued")
    await fail(app, job)
    # Sent once more because its answer was lost: the job is shown, and not queued again.
    again = await client.post(path, headers=ONCE)
    assert (again.status_code, again.json()["state"]) == (202, "failed")
    other = await failed_job(app, client)
    refused = await client.post(f"/v1/jobs/{other}/retry", headers=ONCE)
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:evenkeel:idempotency-key-reused")
    assert (await client.post(path, headers={"Idempotency-Key": "another"})).json()["state"] == "queued"


async def test_a_refused_retry_frees_its_key(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    job = str((await client.post("/v1/jobs", json=job_body())).json()["id"])
    path = f"/v1/jobs/{job}/retry"
    assert (await client.post(path, headers=ONCE)).status_code == 409
    await fail(app, job)
    assert (await client.post(path, headers=ONCE)).json()["state"] == "queued"


async def test_a_trigger_fires_once(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body(), "overlap": "queue"}
    assert (await client.post("/v1/schedules", json=body)).status_code == 201
    path = "/v1/schedules/daily/trigger"
    first = await client.post(path, json={"firing_date": "2026-01-01"}, headers=ONCE)
    again = await client.post(path, json={"firing_date": "2026-01-01"}, headers=ONCE)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert again.headers["location"] == first.headers["location"]
    assert (await client.post(path, json={"firing_date": "2026-01-02"}, headers=ONCE)).status_code == 422
    assert len((await client.get("/v1/jobs")).json()["items"]) == 1
    # In flight: its first request has not answered, and has not died long enough ago.
    async with app.state.database.write() as connection:
        await connection.execute(tables.idempotency.update().values(answer=sa.null(), created_at=tables.now()))
    waits = await client.post(path, json={"firing_date": "2026-01-01"}, headers=ONCE)
    assert (waits.status_code, waits.headers["retry-after"]) == (409, "1")
    async with app.state.database.write() as connection:
        old = tables.now() - idempotency.IN_FLIGHT
        await connection.execute(tables.idempotency.update().values(created_at=old))
    overtakes = await client.post(path, json={"firing_date": "2026-01-01"}, headers=ONCE)
    assert overtakes.status_code == 202


async def test_a_job_for_another_tenant_is_another_request(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, dataset_body: dict[str, Any]
) -> None:
    state = app.state
    state.settings = dataclasses.replace(state.settings, tenant_data_roots=(("ads", state.settings.data_roots[0]),))
    ads = {HEADER: "ads"}
    assert (await client.post("/v1/datasets", json=dataset_body, headers=ads)).status_code == 201
    own = await client.post("/v1/jobs", json=job_body(), headers=ONCE)
    assert own.json()["tenant"] == "default"
    theirs = await client.post("/v1/jobs", json=job_body(), headers=ONCE | ads)
    assert (theirs.status_code, theirs.json()["type"]) == (422, "urn:evenkeel:idempotency-key-reused")


async def test_a_promotion_is_done_once(app: FastAPI, client: httpx.AsyncClient) -> None:
    settings = app.state.settings
    first, _ = published.publish(settings)
    second, _ = published.publish(settings, seed=2)
    path = "/v1/collections/items/versions/{}/promote"
    body = {"reason": "back", "if_current": second}
    done = await client.post(path.format(first), json=body, headers=ONCE)
    assert done.status_code == 200, done.text
    await client.post(path.format(second), json={"reason": "forth"})
    again = await client.post(path.format(first), json=body, headers=ONCE)
    assert (again.status_code, again.json()) == (200, done.json())
    current = (await client.get("/v1/collections/items/versions/current")).json()
    assert current["version"] == second, "the second request has changed nothing"
    assert (await client.post(path.format(second), json=body, headers=ONCE)).status_code == 422
    # One that was refused may be sent corrected.
    stale = {"Idempotency-Key": "stale"}
    assert (await client.post(path.format(first), json={**body, "if_current": first}, headers=stale)).status_code == 409
    assert (await client.post(path.format(first), json=body, headers=stale)).status_code == 200
