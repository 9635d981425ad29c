"""What a hostile client sends: bodies that are cheap to write and dear to read, numbers at the edge, odd methods."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.api.middleware import STRANGER_BYTES
from service.core import text_validation, thread_pools
from service.core.errors import MAX_PROBLEMS
from service.datasets import registry
from tests.service.service_kit import client_of, job_body, until

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}


async def test_long_names_around_long_lists_are_read_in_no_time(client: httpx.AsyncClient) -> None:
    # Putting a path together for each element copied the name 500 000 times: minutes, for everyone.
    body = b'{"' + b"k" * 1_000_000 + b'":[' + b"0," * 4_000 + b'"\\u0000"]}'
    started = time.perf_counter()
    response = await client.post("/v1/jobs", content=body, headers=JSON)
    assert response.status_code == 422
    assert len(response.json()["errors"][0]["field"]) == text_validation.FIELD_LENGTH
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'"\u0000"', ""),
        (rb'{"labels": {"a": ["x", {"b": "\ud800"}]}}', "labels.a.1.b"),
        (rb'{"labels": {"\udfff": 1}}', "labels.\\udfff"),
    ],
)
async def test_the_place_of_odd_text_is_named(reading: httpx.AsyncClient, body: bytes, field: str) -> None:
    errors = (await reading.post("/v1/jobs", content=body, headers=JSON)).json()["errors"]
    assert [error["field"] for error in errors] == [field]
    assert "cannot be stored" in errors[0]["message"]


async def test_whole_surrogate_pairs_are_text(client: httpx.AsyncClient, dataset: str) -> None:
    body = job_body(labels={"team": "\U0001f600"})
    response = await client.post("/v1/jobs", json=body)  # httpx sends it as UTF-8
    assert response.status_code == 202
    escaped = httpx.Request("POST", "http://x", json=body).content.replace("\U0001f600".encode(), rb"\ud83d\ude00")
    response = await client.post("/v1/jobs", content=escaped, headers=JSON)
    assert response.status_code == 202
    assert response.json()["labels"]["team"] == "\U0001f600"


async def test_strangers_cannot_send_much(app: FastAPI, stranger: httpx.AsyncClient, admin_key: str) -> None:
    body = b'{"ids": [' + b"1," * STRANGER_BYTES + b"1]}"
    path = "/v1/collections/none/vectors"
    assert (await stranger.post(path, content=body, headers=JSON)).status_code == 413

    async def chunks() -> Any:
        yield body

    assert (await stranger.post(path, content=chunks(), headers=JSON)).status_code == 413
    session = await stranger.post("/session", content=body, headers={**JSON, "Authorization": "Bearer x"})
    assert session.status_code == 413
    async with client_of(app, admin_key) as client:
        assert (await client.post(path, content=body, headers=JSON)).status_code == 422  # too many ids, but read


async def test_thousands_of_wrong_fields_are_not_all_told(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/keys", json={f"f{number}": 1 for number in range(4_000)})
    errors = response.json()["errors"]
    assert len(errors) == MAX_PROBLEMS + 1
    assert errors[-1]["message"].endswith("more")


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1])
async def test_a_log_that_ends_before_is_read_from_its_beginning(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, offset: int
) -> None:
    job = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    directory: Path = app.state.settings.run_dir(job)
    directory.mkdir()
    (directory / "log.txt").write_text("one line\n")
    response = await client.get(f"/v1/jobs/{job}/logs", params={"offset": offset})
    assert (response.status_code, response.text) == (200, "")
    assert response.headers["Evenkeel-Next-Offset"] == "0"  # another log took its place
    await client.post(f"/v1/jobs/{job}/cancel")
    stream = await client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": f"0-{10**18 - 1}"})
    assert stream.status_code == 200
    assert stream.text.count("one line") == 1  # from its beginning


@pytest.mark.parametrize("instant", ["", "-1", "2026-01-01T00:00:00", "1" * 17, "1e9", "\u0661"])
async def test_cursors_at_the_edge_of_time(client: httpx.AsyncClient, dataset: str, instant: str) -> None:
    body = {"name": "daily", "cron": "0 3 * * *", "job": job_body()}
    assert (await client.post("/v1/schedules", json=body)).status_code == 201
    response = await client.get("/v1/schedules/daily/firings", params={"cursor": instant.encode().hex()})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "cursor"
    for last in (0, 10**16 - 1):  # every cursor that has the documented form is taken
        response = await client.get("/v1/schedules/daily/firings", params={"cursor": str(last).encode().hex()})
        assert (response.status_code, response.json()["items"]) == (200, [])


async def test_a_key_cannot_expire_after_the_end_of_time(client: httpx.AsyncClient) -> None:
    body = {"name": "late", "scopes": ["jobs:read"], "expires_at": "9999-12-31T23:59:59-23:59"}
    response = await client.post("/v1/keys", json=body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "expires_at"


@pytest.mark.parametrize("bound", ["since", "until"])
@pytest.mark.parametrize("instant", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
async def test_the_audit_log_is_not_asked_beyond_time(client: httpx.AsyncClient, bound: str, instant: str) -> None:
    response = await client.get("/v1/audit", params={bound: instant})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == bound


async def test_a_time_limit_that_json_cannot_hold(client: httpx.AsyncClient, dataset: str) -> None:
    body = json.dumps(job_body(resources={"timeout_seconds": 7})).replace(" 7", " 1e999")
    response = await client.post("/v1/jobs", content=body.encode(), headers=JSON)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "resources.timeout_seconds"


async def test_a_path_longer_than_any(client: httpx.AsyncClient, app: FastAPI) -> None:
    uri = f"{app.state.settings.data_roots[0]}/{'a' * 3000}"
    response = await client.post("/v1/datasets/infer", json={"uri": uri})
    assert response.status_code == 422
    assert "too long" in response.json()["detail"]


async def test_made_up_methods_leave_nothing_behind(client: httpx.AsyncClient) -> None:
    for number in range(20):
        assert (await client.request(f"MADEUP{number}", "/healthz")).status_code == 405
    metrics = (await client.get("/metrics")).text
    assert "MADEUP" not in metrics
    assert 'evenkeel_http_requests_total{method="other",route="/healthz",status="405"} 20.0' in metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/collections/items/vectors", {"ids": ["9" * 2_000_000]}),
        ("/v1/collections/items/vectors", {"ids": [1], "version": "v" * 2_000_000}),
        ("/v1/collections/items/vectors", {"ids": [1], **{f"field-{number}": 1 for number in range(50_000)}}),
        ("/v1/collections/items/neighbors", {"id": 10, "version": "v" * 1_000_000}),
        ("/v1/collections/items/erase", {"ids": ["9" * 2_000_000], "reason": "x"}),
        ("/v1/collections/items/erase", {"ids": [None] * 50_000, "reason": "x"}),
    ],
)
@pytest.mark.usefixtures("items")
async def test_answers_to_giants_are_short(reading: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await reading.post(path, json=body)
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(answer.content) < 50_000
    if len(body) > 50_000:
        assert "and 49980 more" in answer.json()["detail"]


async def test_what_is_secret_is_the_owners_alone(app: FastAPI) -> None:
    home: Path = app.state.settings.home
    for name in ("admin.key", "evenkeel.db"):
        assert (home / name).stat().st_mode & 0o077 == 0, name
    assert (home / "runs").stat().st_mode & 0o077 == 0


async def test_no_trailing_slash_leads_elsewhere(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/jobs/")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


async def test_reading_data_sets_keeps_nobody_else_waiting(
    client: httpx.AsyncClient, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many profiles at once are worked off two by two; what needs a thread for a moment gets it."""
    go_on, busy = threading.Event(), []

    def profile(settings: Any, spec: Any) -> dict[str, Any]:
        busy.append(1)
        assert go_on.wait(300)
        return {"rows": 12}

    monkeypatch.setattr(registry, "profile", profile)
    profiles = [asyncio.create_task(client.get("/v1/datasets/ratings/profile")) for _ in range(40)]

    async def all_busy() -> bool:
        return len(busy) >= thread_pools.NUM_THREADS

    await until(all_busy)
    await asyncio.sleep(0.2)  # a third one would come in this time
    assert len(busy) == thread_pools.NUM_THREADS
    assert (await asyncio.wait_for(client.post("/v1/jobs", json=job_body()), 60)).status_code == 202
    go_on.set()
    assert {(await one).status_code for one in profiles} == {200}
