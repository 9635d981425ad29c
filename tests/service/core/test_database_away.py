"""A server that refuses connections, or ends one, is away, whatever it says meanwhile: it is no wrong statement."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError, OperationalError

from service.core.database import Database
from service.identity import keys
from service.identity.auth import Authenticator
from tests.service.service_kit import until
from tests.service.starting_postgres import starting_postgres

pytestmark = pytest.mark.anyio


async def test_requests_are_told_to_come_again(app: FastAPI, client: httpx.AsyncClient, admin_key: str) -> None:
    assert (await client.get("/v1/jobs")).status_code == 200
    whole = app.state.database
    with starting_postgres() as url:
        app.state.database = Database(url)
        for method, path in (("GET", "/v1/jobs"), ("DELETE", "/v1/schedules/daily")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:evenkeel:database-unavailable")
            assert answer.headers["retry-after"].isdigit()
            assert "starting" not in answer.text
        authenticator = Authenticator(whole, fresh_seconds=0)
        known = await authenticator.principal("key", admin_key)
        authenticator._database = app.state.database
        assert await authenticator.principal("key", admin_key) == known
        with pytest.raises(OperationalError):
            await authenticator.principal("key", "ek_00000000_unknown")
    app.state.database = whole


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
@pytest.mark.parametrize(("state", "is_away"), [("57P01", True), ("53100", True), ("22012", False)])
async def test_the_states_of_a_server_that_is_away(database_url: str, state: str, is_away: bool) -> None:
    database = Database(database_url)
    with pytest.raises(DBAPIError) as caught:
        async with database.write() as connection:
            await connection.execute(sa.text(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$"))
    assert isinstance(caught.value, OperationalError) == is_away
    await database.stop()


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
async def test_a_connection_that_is_ended_is_away(database_url: str) -> None:
    database = Database(database_url)
    with pytest.raises(OperationalError):
        async with database.read() as connection:
            await connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))
    async with database.read() as connection:
        assert await connection.scalar(sa.text("SELECT 1")) == 1
    await database.stop()


async def test_keys_are_asked_for_again_whatever_went_wrong(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 0

    async def fails_at_first(connection: object, size: int) -> dict[str, object]:
        nonlocal rounds
        rounds += 1
        if rounds < 3:
            raise RuntimeError("nobody thought of this")
        return {}

    monkeypatch.setattr(keys, "live", fails_at_first)
    task = asyncio.create_task(Authenticator(app.state.database, retry_seconds=0.01).keep_informed())

    async def third() -> bool:
        assert not task.done()
        return rounds >= 3

    await until(third)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
