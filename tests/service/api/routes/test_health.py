"""Liveness, readiness and Prometheus metrics: who may read them, and that they count."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import shutil
import socket
import time
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from service.core import tables
from service.core.tenants import url_of
from service.jobs import job_records
from service.ops import collectors
from tests.service import published
from tests.service.service_kit import BOTH, client_of, job_body
from tests.service.starting_postgres import starting_postgres

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
        row = await job_records.locked(connection, made[1])
        beat = tables.now() - datetime.timedelta(seconds=40)
        await job_records.change(connection, row, state="running", heartbeat_at=beat)
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
    assert found["evenkeel_disk_free_bytes", (("disk", "home"),)] > 0
    assert ("evenkeel_disk_free_bytes", (("disk", "store"),)) not in found, "it is the same disk"


@BOTH
async def test_one_that_is_tried_again_has_not_waited_since_it_was_made(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    started = time.monotonic()
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job_id)
        await job_records.change(connection, row, state="failed", created_at=tables.now() - datetime.timedelta(days=3))
    assert (await client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    assert (await read(client))["evenkeel_queue_wait_seconds", ()] < time.monotonic() - started + 1
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job_id)
        await job_records.change(connection, row, not_before=tables.now() - datetime.timedelta(seconds=40))
    assert 40 <= (await read(client))["evenkeel_queue_wait_seconds", ()] < time.monotonic() - started + 41


async def test_failures_of_the_last_hour(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    """Also of one that failed before, was tried again and failed once more: the number that have failed is the same."""
    for minutes, state in ((59, "failed"), (61, "failed"), (1, "cancelled")):
        job_id = (await client.post("/v1/jobs", json=job_body())).json()["id"]
        async with app.state.database.write() as connection:
            row = await job_records.locked(connection, job_id)
            ended = tables.now() - datetime.timedelta(minutes=minutes)
            await job_records.change(connection, row, state=state, finished_at=ended)
    assert (await read(client))["evenkeel_jobs_failed_last_hour", ()] == 1


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


async def test_a_run_under_way_and_what_it_was_good_for(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    """Its pace while it runs; the figures of its last epoch once it has ended; of each name the latest job alone."""
    made = [(await client.post("/v1/jobs", json=job_body())).json()["id"] for _ in range(3)]
    progress = {
        "epoch": 2,
        "epochs": 3,
        "step": 7,
        "examples_per_second": 1234.5,
        "step_seconds": 0.25,
        "waited_seconds": 0.5,
        "loss": 0.61,
    }
    week = datetime.timedelta(days=7)
    async with app.state.database.write() as connection:
        await job_records.change(
            connection, await job_records.locked(connection, made[2]), state="running", progress=progress
        )
        for job_id, auc in ((made[0], 0.6), (made[1], 0.7)):
            row = await job_records.locked(connection, job_id)
            await job_records.change(connection, row, state="succeeded", finished_at=tables.now())
            values = [
                {
                    "job_id": job_id,
                    "epoch": epoch,
                    "split": "test",
                    "values": {"auc": auc + epoch / 100, "note": "text"},
                }
                for epoch in (1, 2)
            ]
            await connection.execute(tables.job_metric.insert(), values)
    found = await read(client)
    run = (("job", made[2]), ("name", "small"))
    assert found["evenkeel_run_examples_per_second", run] == 1234.5
    assert found["evenkeel_run_step_seconds", run] == 0.25
    assert found["evenkeel_run_waited_seconds", run] == 0.5
    assert found["evenkeel_run_loss", run] == 0.61
    figures = {
        dict(labels)["metric"]: value for (name, labels), value in found.items() if name == "evenkeel_job_metric"
    }
    assert figures == {"auc": pytest.approx(0.72)}
    # A later job of that name, of another tenant: its figures take nobody's place.
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().where(tables.job.c.id == made[1]).values(tenant="ads"))
    found = await read(client)
    names = {dict(labels)["name"]: value for (name, labels), value in found.items() if name == "evenkeel_job_metric"}
    assert names == {"small": pytest.approx(0.62), "ads/small": pytest.approx(0.72)}
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().values(finished_at=tables.now() - week, state="succeeded"))
    found = await read(client)
    assert not any(name in ("evenkeel_job_metric", "evenkeel_run_loss") for name, _ in found)


async def test_versions_their_age_and_verdicts(app: FastAPI, client: httpx.AsyncClient, settings: Any) -> None:
    published.publish(settings, "items")
    published.publish(settings, "items", seed=1)
    published.hold(settings, "items")
    published.publish(settings, "films")
    published.hold(settings, "films")
    published.publish(settings, "films", num_items=7)  # what was held before it is of the past
    published.publish(settings, "films-nulls-0123abcd")  # of a calibration of an earlier version: nobody refreshes it
    found = await read(client)
    assert {dict(labels)["collection"] for name, labels in found if name == "evenkeel_collection_rows"} == {
        "items",
        "films",
    }

    def of(name: str, collection: str, **labels: str) -> float:
        return found[name, tuple(sorted({"collection": collection, **labels}.items()))]

    assert 0 <= of("evenkeel_collection_age_seconds", "items") < 300
    assert of("evenkeel_collection_rows", "films") == 7
    states = {
        state: of("evenkeel_collection_versions", "items", state=state) for state in ("published", "held", "superseded")
    }
    assert states == {"published": 1, "held": 1, "superseded": 1}
    assert of("evenkeel_collection_held", "items") == 1
    assert of("evenkeel_collection_held", "films") == 0
    assert 0 < of("evenkeel_collection_held_seconds", "items") < 300
    assert of("evenkeel_collection_held_seconds", "films") == 0
    assert of("evenkeel_collection_max_held", "items") == 3
    assert of("evenkeel_gate_value", "items", metric="mean_cosine") == 0.1
    assert of("evenkeel_gate_failed", "items") == 1
    assert of("evenkeel_collection_unreadable", "items") == 0


async def test_a_collection_that_cannot_be_read_does_not_hide_the_others(
    client: httpx.AsyncClient, settings: Any
) -> None:
    published.publish(settings, "items")
    published.publish(settings, "films")
    (manifest,) = (settings.home / "store").glob("**/films/**/manifest.json")
    manifest.write_text("{")
    found = await read(client)
    assert found["evenkeel_collection_unreadable", (("collection", "films"),)] == 1
    assert found["evenkeel_collection_rows", (("collection", "items"),)] == 50


async def test_fetches_are_timed_by_collection_and_format(client: httpx.AsyncClient, settings: Any) -> None:
    published.publish(settings, "items")
    body = {"ids": [10, 20, 30]}
    (await client.post("/v1/collections/items/vectors", json=body)).raise_for_status()
    arrow = {"Accept": "application/vnd.apache.arrow.stream"}
    (await client.post("/v1/views/items_rff/vectors", json=body, headers=arrow)).raise_for_status()
    found = await read(client)
    for form in ("json", "arrow"):
        assert found["evenkeel_fetch_seconds_count", (("collection", "items"), ("format", form))] == 1
    assert found["evenkeel_fetched_ids_sum", (("collection", "items"),)] == 6


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


@pytest.mark.parametrize("kind", ["refused", "starting", "silent"])
async def test_metrics_tell_of_a_database_that_is_away(
    app: FastAPI, client: httpx.AsyncClient, settings: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The alerts of an outage look at counters and disks; what the store has is not the database's."""
    published.publish(settings)
    app.state.metrics.background_errors.labels("runner").inc()
    whole = app.state.database
    monkeypatch.setattr(collectors, "PATIENCE_SECONDS", 0.2)
    with starting_postgres() as starting, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if kind == "silent" else 1
        url = starting if kind == "starting" else f"postgresql://none@127.0.0.1:{port}/none"
        app.state.database = type(whole)(url)
        found = {name for name, _ in await read(client)}
    app.state.database = whole
    monkeypatch.undo()
    told = {"evenkeel_background_errors_total", "evenkeel_disk_free_bytes", "evenkeel_collection_rows"}
    assert told <= found
    assert "evenkeel_queue_wait_seconds" not in found
    assert "evenkeel_queue_wait_seconds" in {name for name, _ in await read(client)}


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


async def test_metrics_are_of_all_tenants_and_read_by_the_default_one(
    app: FastAPI, client: httpx.AsyncClient, settings: Any
) -> None:
    async def key(*scopes: str, **headers: str) -> str:
        body = {"name": "scraper", "scopes": scopes}
        return str((await client.post("/v1/keys", json=body, headers=headers)).raise_for_status().json()["key"])

    peer = ("203.0.113.9", 1)
    theirs = await key("admin", **{"Evenkeel-Tenant": "ads"})
    for refused in (theirs, await key("features:read")):
        async with client_of(app, refused, peer=peer) as stranger:
            assert (await stranger.get("/metrics")).status_code == 403
    published.publish(settings, "items")
    published.publish(dataclasses.replace(settings, store_url=url_of(settings.store_url, "ads")), "items", num_items=7)
    async with client_of(app, await key("jobs:read"), peer=peer) as scraper:
        found = await read(scraper)
    assert found["evenkeel_collection_rows", (("collection", "items"),)] == 50
    assert found["evenkeel_collection_rows", (("collection", "ads/items"),)] == 7
