"""What changes something is entered in the audit log before its answer leaves, whatever becomes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from service.identity import audit
from service.identity.keys import Principal
from tests.service import published
from tests.service.service_kit import BOTH, client_of, job_body, running
from tests.service.starting_postgres import starting_postgres

pytestmark = pytest.mark.anyio


async def entries(client: httpx.AsyncClient, **filters: Any) -> list[dict[str, Any]]:
    answer = await client.get("/v1/audit", params=filters)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


@BOTH
async def test_who_did_what_to_which_object_from_where(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, key_with: Any
) -> None:
    job = (await client.post("/v1/jobs", json=job_body())).json()
    reader = await key_with("jobs:read")
    async with client_of(app, reader, peer=("203.0.113.9", 5)) as other:
        assert (await other.post(f"/v1/jobs/{job['id']}/cancel")).status_code == 403
        assert (await other.get("/v1/jobs")).status_code == 200
    await client.delete("/v1/schedules/none")
    await client.post("/v1/jobs", json={})
    found = await entries(client)
    assert [(one["action"], one["object"], one["status"]) for one in found] == [
        ("POST /v1/jobs", "/v1/jobs", 422),
        ("DELETE /v1/schedules/{name}", "/v1/schedules/none", 404),
        ("POST /v1/jobs/{job_id}/cancel", f"/v1/jobs/{job['id']}/cancel", 403),
        ("POST /v1/keys", found[3]["object"], 201),
        ("POST /v1/jobs", f"/v1/jobs/{job['id']}", 202),
        ("POST /v1/datasets", f"/v1/datasets/{dataset}", 201),
    ]
    assert found[3]["object"] == f"/v1/keys/{found[2]['key_id']}"
    assert found[2]["address"] == "203.0.113.9"
    assert {one["key_name"] for one in found} == {"admin", "test"}
    assert await entries(client, key=found[2]["key_id"]) == [found[2]]
    assert await entries(client, since=found[1]["at"], limit=200) == [
        one for one in found if one["at"] >= found[1]["at"]
    ]
    assert await entries(client, until=found[-1]["at"]) == []


async def test_a_submission_is_entered_once_and_so_is_its_repetition(client: httpx.AsyncClient, dataset: str) -> None:
    headers = {"Idempotency-Key": "k"}
    job = (await client.post("/v1/jobs", json=job_body(), headers=headers)).json()["id"]
    assert (await client.post("/v1/jobs", json=job_body(), headers=headers)).json()["id"] == job
    found = await entries(client)
    assert [(one["object"], one["status"]) for one in found[:-1]] == [(f"/v1/jobs/{job}", 202)] * 2


async def test_sessions_are_entered_and_fetches_are_not(
    app: FastAPI, client: httpx.AsyncClient, settings: Settings
) -> None:
    published.publish(settings)
    await client.post("/v1/collections/items/vectors", json={"ids": [10]})
    await client.post("/v1/collections/items/neighbors", json={"id": 10})
    key = client.headers["Authorization"].split()[1]
    async with client_of(app) as browser:
        assert (await browser.post("/session", json={"key": key})).status_code == 204
    body = {"reason": "seen", "if_current": "v000001"}
    assert (await client.post("/v1/collections/items/versions/v000001/promote", json=body)).status_code == 200
    assert [one["action"] for one in await entries(client)] == [
        "POST /v1/collections/{collection}/versions/{version}/promote",
        "POST /session",
    ]


@pytest.fixture(params=["refused", "starting"])
def away_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a database that cannot be used."""
    if request.param == "starting":
        with starting_postgres() as url:
            yield url
    else:
        yield "postgresql+asyncpg://none@127.0.0.1:1/none"


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
async def test_entries_wait_while_the_database_is_away(settings: Settings, away_url: str) -> None:
    """A promotion needs the store alone, and is entered all the same."""
    published.publish(settings)
    async with running(settings) as app:
        key = settings.admin_key_file.read_text().strip()
        async with client_of(app, key) as client:
            await client.get("/v1/audit")
            whole = app.state.audit._database
            app.state.audit._database = type(whole)(away_url)
            body = {"reason": "rolled back in the night"}
            for _ in range(2):
                answer = await client.post("/v1/collections/items/versions/v000001/promote", json=body)
                assert answer.status_code == 200, answer.text
            file = settings.home / audit.FILE_NAME
            assert len(file.read_text().splitlines()) == 2
            assert file.stat().st_mode & 0o777 == 0o600
            assert await entries(client) == []
            app.state.audit._database = whole
            async with whole.write() as connection:  # one of them got there, and the process died before it said so
                first = json.loads(file.read_text().splitlines()[0])
                values = {**first, "at": tables.now()}
                await connection.execute(tables.audit.insert().values(values))
            await client.delete("/v1/datasets/none")
            assert [one["status"] for one in await entries(client)] == [404, 200, 200]
            assert file.read_text() == ""


async def test_an_entry_that_was_cut_off_holds_up_no_other(
    app: FastAPI, client: httpx.AsyncClient, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was killed within a line had not answered yet: what it was about to enter is in the log."""
    await client.delete("/v1/datasets/none")
    (before,) = await entries(client)
    whole = json.dumps({**before, "id": "audit_0whole", "object": "/v1/datasets/whole"})
    file = settings.home / audit.FILE_NAME
    file.write_text(f"{whole}\n{whole[: len(whole) // 2]}")
    database = app.state.audit._database
    app.state.audit._database = type(database)("postgresql+asyncpg://none@127.0.0.1:1/none")
    await client.delete("/v1/datasets/kept")  # appended to the half line
    app.state.audit._database = database
    await client.delete("/v1/datasets/last")
    found = {one["object"].removeprefix("/v1/datasets/") for one in await entries(client)}
    assert found == {"none", "whole", "kept", "last"}
    assert file.read_text() == ""
    (cut,) = [line for line in caplog.messages if "cut off" in line]
    assert whole[: len(whole) // 2] in cut


@pytest.mark.slow
@BOTH
async def test_entries_of_the_same_moment_share_a_commit_and_none_keeps_another_out(
    app: FastAPI, client: httpx.AsyncClient, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    kept, principal = app.state.audit, Principal("key_1", "test", ())
    rows = [audit.entry(principal, "default", "POST /v1/x", f"/v1/x/{number}", 200, "") for number in range(20)]
    rows[7]["key_name"] = None  # refused by the database
    write, commits = kept._database.write, 0

    def counted() -> Any:
        nonlocal commits
        commits += 1
        return write()

    kept._database.write = counted
    try:
        await asyncio.gather(*(kept.record(row) for row in rows[:7] + rows[8:]))
        assert commits <= 2
        await asyncio.gather(*(kept.record(row) for row in rows))
        await kept.record(rows[0])
    finally:
        del kept._database.write
    assert (settings.home / audit.FILE_NAME).read_text() == ""
    assert any("refuses an entry" in line for line in caplog.messages)
    found = [one["object"] for one in await entries(client, limit=200)]
    assert sorted(found) == sorted({f"/v1/x/{number}" for number in range(20)} - {"/v1/x/7"})


async def test_what_is_done_stands_where_no_disk_takes_its_entry(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    published.publish(settings)
    async with running(settings) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.get("/v1/audit")
            whole = app.state.audit._database
            app.state.audit._database = type(whole)("postgresql+asyncpg://none@127.0.0.1:1/none")
            (settings.home / audit.FILE_NAME).symlink_to("/dev/full")
            body = {"reason": "rolled back with a full disk"}
            answer = await client.post("/v1/collections/items/versions/v000001/promote", json=body)
            assert answer.status_code == 200, answer.text
            (lost,) = [line for line in caplog.messages if "entry lost" in line]
            entry = json.loads(lost[lost.index("{") :])
            assert (entry["status"], entry["object"]) == (200, "/v1/collections/items/versions/v000001/promote")
            app.state.audit._database = whole


async def test_a_key_that_sends_too_much_is_told_to_wait(settings: Settings) -> None:
    async with running(dataclasses.replace(settings, requests_per_second=0.001)) as app:
        key = settings.admin_key_file.read_text().strip()
        async with client_of(app, key) as client:
            first, second = [await client.get("/v1/jobs") for _ in range(2)]
            assert (first.status_code, second.status_code) == (200, 429)
            assert int(second.headers["Retry-After"]) > 1
            assert second.headers["content-type"] == "application/problem+json"
            assert (await client.get("/healthz")).status_code == 200
            opened = await client.post("/session", json={"key": key})
            assert (opened.status_code, (await client.get("/")).status_code) == (429, 429)
        async with app.state.database.read() as connection:
            assert await connection.scalar(sa.select(sa.func.count()).select_from(tables.job)) == 0
