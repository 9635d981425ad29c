"""Liveness, readiness and Prometheus metrics: who may read them, and that they count."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import time
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from service_kit import client_of, job_body

from service import jobs, tables

pytestmark = pytest.mark.anyio


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


async def read(client: httpx.AsyncClient) -> dict[Any, float]:
    return samples((await client.get("/metrics")).raise_for_status().text)


async def test_public_and_ready(stranger: httpx.AsyncClient) -> None:
    assert (await stranger.get("/healthz")).json() == {"status": "ok"}
    ready = await stranger.get("/readyz")
    assert ready.json() == {"status": "ok", "checks": {"database": "ok", "disk": "ok"}}


async def test_a_nearly_full_disk_is_not_ready(stranger: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))
    response = await stranger.get("/readyz")
    assert response.status_code == 503
    assert response.json()["errors"][0]["field"] == "disk"
    assert "1000 bytes free" in response.json()["detail"]


async def test_jobs_are_counted_by_state(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    started = time.monotonic()
    made = [(await client.post("/v1/jobs", json=job_body())).json()["id"] for _ in range(3)]
    await client.post(f"/v1/jobs/{made[0]}/cancel")
    async with app.state.database.write() as connection:
        row = await jobs.locked(connection, made[1])
        beat = tables.now() - datetime.timedelta(seconds=40)
        await jobs.change(connection, row, state="running", heartbeat_at=beat)
    await asyncio.sleep(0.05)
    found = await read(client)
    by_state = {labels[0][1]: value for (name, labels), value in found.items() if name == "evenkeel_jobs"}
    assert set(by_state) == {
        "queued", "starting", "running", "publishing", "cancelling", "succeeded", "failed", "cancelled",
    }  # fmt: skip
    assert {state: count for state, count in by_state.items() if count} == {"queued": 1, "running": 1, "cancelled": 1}
    passed = time.monotonic() - started
    assert 0.04 < found["evenkeel_queue_wait_seconds", ()] < passed + 1
    assert 40 <= found["evenkeel_heartbeat_age_seconds", ()] < 41 + passed
    assert found["evenkeel_disk_free_bytes", ()] > 0


async def test_scheduler_lag(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body()}
    await client.post("/v1/schedules", json=body)
    assert (await read(client))["evenkeel_scheduler_lag_seconds", ()] == 0
    async with app.state.database.write() as connection:
        late = tables.now() - datetime.timedelta(minutes=5)
        await connection.execute(tables.schedule.update().values(next_fire_at=late))
    started = time.monotonic()
    lag = (await read(client))["evenkeel_scheduler_lag_seconds", ()]
    assert 300 <= lag < 310 + time.monotonic() - started


async def test_requests_are_counted_by_route_and_not_by_path(client: httpx.AsyncClient) -> None:
    for number in range(5):
        await client.get(f"/v1/jobs/job_{number}")
        await client.get(f"/wild/{number}")
    found = await read(client)
    counted = {
        dict(labels)["route"]: value
        for (name, labels), value in found.items()
        if name == "evenkeel_http_requests_total"
    }
    assert counted["/v1/jobs/{job_id}"] == 5
    assert counted["unmatched"] == 5
    assert not any("job_1" in route or "wild" in route for route in counted)


@pytest.mark.parametrize("peer", [("127.0.0.1", 1), ("::1", 1)])
async def test_metrics_are_public_on_loopback(app: FastAPI, peer: tuple[str, int]) -> None:
    async with client_of(app, peer=peer) as client:
        assert (await client.get("/metrics")).status_code == 200
        # A proxy on this machine speaks for someone else.
        for header in ("X-Forwarded-For", "Forwarded"):
            assert (await client.get("/metrics", headers={header: "for=203.0.113.9"})).status_code == 401


async def test_metrics_need_a_key_from_elsewhere(app: FastAPI, admin_key: str) -> None:
    for peer in (("203.0.113.9", 1), ("testclient", 1)):
        async with client_of(app, peer=peer) as client:
            assert (await client.get("/metrics")).status_code == 401
        async with client_of(app, admin_key, peer=peer) as client:
            assert (await client.get("/metrics")).status_code == 200
