"""Rotation of keys: the secret before goes on for a while, or ends at once."""

from __future__ import annotations

import datetime

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.identity import keys
from service.identity.auth import Authenticator
from tests.service.service_kit import BOTH, client_of

pytestmark = [pytest.mark.anyio, BOTH]


async def status(app: FastAPI, key: str) -> int:
    async with client_of(app, key) as client:
        return (await client.get("/v1/jobs")).status_code


async def test_both_secrets_work_and_then_the_new_one_alone(app: FastAPI, client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/keys", json={"name": "ranking", "scopes": ["jobs:read"]})).json()
    rotated = (await client.post(f"/v1/keys/{made['id']}/rotate")).json()
    assert rotated["id"] == made["id"]
    assert rotated["key"] != made["key"]
    assert [await status(app, key) for key in (made["key"], rotated["key"])] == [200, 200]
    async with app.state.database.read() as connection:
        live = await keys.live(connection, 100)
    assert {keys.digest(made["key"]), keys.digest(rotated["key"])} <= live.keys()
    table = tables.api_key
    past = tables.now() - datetime.timedelta(seconds=1)
    async with app.state.database.write() as connection:
        await connection.execute(sa.update(table).where(table.c.id == made["id"]).values(old_until=past))
    app.state.authenticator.forget()
    assert [await status(app, key) for key in (made["key"], rotated["key"])] == [401, 200]


async def test_without_overlap_the_secret_and_its_sessions_end(app: FastAPI, client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/keys", json={"name": "ranking", "scopes": ["jobs:read"]})).json()
    async with client_of(app) as browser:
        assert (await browser.post("/session", json={"key": made["key"]})).status_code == 204
        assert (await browser.get("/v1/jobs")).status_code == 200
        rotated = await client.post(f"/v1/keys/{made['id']}/rotate", json={"overlap_seconds": 0})
        assert (await browser.get("/v1/jobs")).status_code == 401
    assert [await status(app, key) for key in (made["key"], rotated.json()["key"])] == [401, 200]
    again = (await client.post(f"/v1/keys/{made['id']}/rotate")).json()  # of two before, the latest goes on
    twice = (await client.post(f"/v1/keys/{made['id']}/rotate")).json()
    found = [await status(app, key) for key in (rotated.json()["key"], again["key"], twice["key"])]
    assert found == [401, 200, 200]


async def test_a_key_that_has_ended_is_not_rotated(app: FastAPI, client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/keys", json={"name": "ranking", "scopes": ["jobs:read"]})).json()
    await client.post(f"/v1/keys/{made['id']}/rotate")
    assert (await client.delete(f"/v1/keys/{made['id']}")).status_code == 204
    assert await status(app, made["key"]) == 401
    assert (await client.post(f"/v1/keys/{made['id']}/rotate")).status_code == 409
    assert (await client.post("/v1/keys/none/rotate")).status_code == 404


async def test_a_remembered_secret_ends_with_its_overlap(app: FastAPI, client: httpx.AsyncClient) -> None:
    """Also while nothing can be asked of the database."""
    made = (await client.post("/v1/keys", json={"name": "ranking", "scopes": ["jobs:read"]})).json()
    await client.post(f"/v1/keys/{made['id']}/rotate", json={"overlap_seconds": 3600})
    authenticator = Authenticator(app.state.database, fresh_seconds=3600)
    principal = await authenticator.principal("key", made["key"])
    assert principal is not None
    assert principal.expires_at is not None
    left = (principal.expires_at - tables.now()).total_seconds()
    assert 0 < left <= 3600
