"""Who may do what: keys, scopes, expiry, revocation, the dashboard's cookie, and the first key."""

from __future__ import annotations

import dataclasses
import datetime
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from service.identity import keys
from service.identity.auth import COOKIE, Authenticator
from service.identity.rate_limit import RateLimit
from tests.service.service_kit import ORIGIN, client_of, running

pytestmark = pytest.mark.anyio

# Every route of this service that needs a key, with a scope that is not enough and one that is.
ROUTES = [
    ("GET", "/v1/jobs", "features:read", "jobs:read"),
    ("POST", "/v1/jobs", "jobs:read", "jobs:write"),
    ("GET", "/v1/jobs/job_x", "features:read", "jobs:read"),
    ("POST", "/v1/jobs/job_x/cancel", "jobs:read", "jobs:write"),
    ("POST", "/v1/jobs/job_x/retry", "jobs:read", "jobs:write"),
    ("DELETE", "/v1/jobs/job_x", "jobs:read", "jobs:write"),
    ("GET", "/v1/jobs/job_x/logs", "features:read", "jobs:read"),
    ("GET", "/v1/jobs/job_x/events", "features:read", "jobs:read"),
    ("GET", "/v1/jobs/job_x/report", "features:read", "jobs:read"),
    ("GET", "/v1/datasets", "features:read", "jobs:read"),
    ("POST", "/v1/datasets", "jobs:read", "jobs:write"),
    ("POST", "/v1/datasets/infer", "jobs:read", "jobs:write"),
    ("GET", "/v1/datasets/x", "features:read", "jobs:read"),
    ("GET", "/v1/datasets/x/profile", "features:read", "jobs:read"),
    ("PUT", "/v1/datasets/x", "jobs:read", "jobs:write"),
    ("DELETE", "/v1/datasets/x", "jobs:read", "jobs:write"),
    ("GET", "/v1/schedules", "features:read", "jobs:read"),
    ("POST", "/v1/schedules", "jobs:read", "jobs:write"),
    ("GET", "/v1/schedules/x", "features:read", "jobs:read"),
    ("PATCH", "/v1/schedules/x", "jobs:read", "jobs:write"),
    ("DELETE", "/v1/schedules/x", "jobs:read", "jobs:write"),
    ("POST", "/v1/schedules/x/trigger", "jobs:read", "jobs:write"),
    ("GET", "/v1/schedules/x/firings", "features:read", "jobs:read"),
    ("GET", "/v1/keys", "jobs:write", "admin"),
    ("POST", "/v1/keys", "jobs:write", "admin"),
    ("DELETE", "/v1/keys/x", "jobs:write", "admin"),
    ("POST", "/v1/keys/x/rotate", "jobs:write", "admin"),
    ("GET", "/v1/tenants", "jobs:write", "admin"),
    ("GET", "/v1/audit", "jobs:write", "admin"),
]


async def test_every_route_needs_a_key_with_its_scope(
    app: FastAPI, stranger: httpx.AsyncClient, key_with: Callable[..., Any]
) -> None:
    holders = {scope: await key_with(scope) for scope in keys.SCOPES}
    for method, path, poor, good in ROUTES:
        without = await stranger.request(method, path)
        assert without.status_code == 401, path
        assert without.headers["www-authenticate"] == "Bearer"
        async with client_of(app, holders[poor]) as client:
            refused = await client.request(method, path)
        assert refused.status_code == 403, path
        assert good in refused.json()["detail"]
        async with client_of(app, holders[good]) as client:
            allowed = await client.request(method, path)
        assert allowed.status_code not in (401, 403), path


def test_the_list_of_routes_is_whole(app: FastAPI) -> None:
    """A route without a scope would be open to everyone."""
    public = {"/healthz", "/readyz", "/metrics", "/session", "/openapi.json", "/"}
    ours = ("/v1/jobs", "/v1/datasets", "/v1/schedules", "/v1/keys", "/v1/tenants", "/v1/audit")
    tried = {(method, path.replace("job_x", "{id}").replace("/x", "/{id}")) for method, path, _, _ in ROUTES}
    for path, item in app.openapi()["paths"].items():
        for method, operation in item.items():
            if path not in public and path.startswith("/v1"):
                assert operation.get("security"), path
            if path.startswith(ours):
                parts = ["{id}" if part.startswith("{") else part for part in path.split("/")]
                assert (method.upper(), "/".join(parts)) in tried, path


async def test_a_401_names_the_remedy(stranger: httpx.AsyncClient) -> None:
    for header in ({}, {"Authorization": "Bearer ek_00000000_wrong"}, {"Authorization": "Basic eDp5"}):
        response = await stranger.get("/v1/jobs", headers=header)
        assert response.status_code == 401
        assert "admin.key" in response.json()["errors"][0]["remedy"]
        assert "evenkeel keys" in response.json()["errors"][0]["remedy"]


async def test_keys_are_made_listed_and_revoked(app: FastAPI, client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/keys", json={"name": "ads", "scopes": ["jobs:read"]})).json()
    assert made["key"].startswith(f"ek_{made['prefix']}_")
    listed = (await client.get("/v1/keys")).json()["items"]
    assert [one["name"] for one in listed] == ["ads", "admin"]
    assert all("key" not in one and "hash" not in one for one in listed)
    async with client_of(app, made["key"]) as ads:
        assert (await ads.get("/v1/jobs")).status_code == 200
        assert (await client.delete(f"/v1/keys/{made['id']}")).status_code == 204
        assert (await ads.get("/v1/jobs")).status_code == 401
    assert (await client.delete("/v1/keys/key_none")).status_code == 404
    assert (await client.get("/v1/keys")).json()["items"][0]["revoked_at"] is not None


async def test_a_key_is_kept_as_a_hash_alone(app: FastAPI, client: httpx.AsyncClient, admin_key: str) -> None:
    made = (await client.post("/v1/keys", json={"name": "ads", "scopes": ["jobs:read"]})).json()
    path = Path(app.state.database.url.database)
    stored = b"".join(file.read_bytes() for file in path.parent.glob(path.name + "*"))
    for key in (made["key"], admin_key):
        assert key.encode() not in stored
        assert key.split("_", 2)[2].encode() not in stored


def later(monkeypatch: pytest.MonkeyPatch, by: datetime.timedelta) -> None:
    """Sets the service's clock forward."""
    real = tables.now
    monkeypatch.setattr(tables, "now", lambda: real() + by)


async def test_an_expired_key_is_refused(
    app: FastAPI, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = tables.now() + datetime.timedelta(hours=1)
    body = {"name": "short", "scopes": ["jobs:read"], "expires_at": soon.isoformat()}
    key = (await client.post("/v1/keys", json=body)).json()["key"]
    async with client_of(app, key) as short:
        assert (await short.get("/v1/jobs")).status_code == 200
        later(monkeypatch, datetime.timedelta(hours=2))
        assert (await short.get("/v1/jobs")).status_code == 401
    past = await client.post("/v1/keys", json={**body, "expires_at": "2020-01-01T00:00:00Z"})
    assert past.status_code == 422
    assert past.json()["errors"][0]["field"] == "expires_at"


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "Not A Name", "scopes": ["admin"]},
        {"name": "x", "scopes": ["admin"], "expires_at": "2030-01-01T00:00:00"},
        {"name": "x", "scopes": ["admin"], "hash": "00"},
    ],
)
async def test_bad_key_requests(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await client.post("/v1/keys", json=body)).status_code == 422


async def test_the_first_key_is_made_once_and_for_its_owner_alone(settings: Settings) -> None:
    async with running(settings) as app:
        first = app.state.first_key
        assert first is not None
    path = settings.admin_key_file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().strip() == first
    async with running(settings) as app:
        assert app.state.first_key is None
        async with client_of(app, first) as client:
            assert (await client.get("/v1/keys")).status_code == 200
    assert [one.name for one in path.parent.iterdir() if one.name.startswith(".admin")] == []


async def test_reset_admin_replaces_a_lost_key(app: FastAPI, settings: Settings, admin_key: str) -> None:
    new = await keys.reset_admin(settings)
    assert settings.admin_key_file.read_text().strip() == new != admin_key
    app.state.authenticator.forget()
    async with client_of(app, new) as client:
        assert (await client.get("/v1/keys")).status_code == 200
    async with client_of(app, admin_key) as client:
        assert (await client.get("/v1/keys")).status_code == 401


# --- the dashboard's cookie ------------------------------------------------------------------------------------------


async def log_in(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/session", json={"key": key}, headers={"Origin": ORIGIN})


async def test_a_key_is_exchanged_for_a_cookie(stranger: httpx.AsyncClient, admin_key: str) -> None:
    response = await log_in(stranger, admin_key)
    assert response.status_code == 204
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert admin_key.lower() not in cookie
    assert (await stranger.get("/v1/keys")).status_code == 200
    assert (await stranger.delete("/session", headers={"Origin": ORIGIN})).status_code == 204
    stranger.cookies.set(COOKIE, cookie.partition("=")[2].partition(";")[0])
    assert (await stranger.get("/v1/keys")).status_code == 401


async def test_an_address_that_sends_wrong_keys_is_told_to_wait(
    app: FastAPI, admin_key: str, key_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known keys go on, whatever else comes from their address: a proxy's stands for many."""
    new = await key_with("jobs:read")
    monkeypatch.setattr(app.state.authenticator, "_wrong", RateLimit(0.001, burst=3))
    async with client_of(app, admin_key) as known, client_of(app, "ek_00000000_wrong") as wrong:
        assert (await known.get("/v1/jobs")).status_code == 200
        assert [(await wrong.get("/v1/jobs")).status_code for _ in range(3)] == [401] * 3
        refused = [await wrong.get("/v1/jobs"), await log_in(wrong, "ek_00000000_wrong"), await log_in(wrong, new)]
        assert [one.status_code for one in refused] == [429] * 3
        assert int(refused[0].headers["Retry-After"]) > 1
        assert (await known.get("/v1/jobs")).status_code == 200
    async with client_of(app, new, peer=("203.0.113.9", 5)) as elsewhere:
        assert (await elsewhere.get("/v1/jobs")).status_code == 200


async def test_other_addresses_of_its_own_network_do_not_help(
    app: FastAPI, admin_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.state.authenticator, "_wrong", RateLimit(0.001, burst=3))

    async def status_of(peer: str) -> int:
        async with client_of(app, "ek_00000000_wrong", peer=(peer, 5)) as wrong:
            return (await wrong.get("/v1/jobs")).status_code

    for number in range(3):
        assert await status_of(f"2001:db8:1:2:{number}::1") == 401
    assert await status_of("2001:db8:1:2:ffff::") == 429
    assert await status_of("2001:db8:1:3::1") == 401
    assert await status_of("::ffff:203.0.113.9") == 401
    assert await status_of("::ffff:203.0.113.10") == 401
    assert [await status_of("203.0.113.9") for _ in range(3)] == [401, 401, 429]  # the same address, written otherwise


async def test_a_wrong_key_opens_no_session(stranger: httpx.AsyncClient) -> None:
    response = await log_in(stranger, "ek_00000000_wrong")
    assert response.status_code == 401
    assert "set-cookie" not in response.headers


@pytest.mark.slow
@pytest.mark.parametrize("origin", [None, "http://evil.example", "http://127.0.0.1:9999", "null"])
async def test_unsafe_requests_by_cookie_need_our_own_origin(
    stranger: httpx.AsyncClient, admin_key: str, origin: str | None
) -> None:
    await log_in(stranger, admin_key)
    headers = {} if origin is None else {"Origin": origin}
    body = {"name": "x", "scopes": ["admin"]}
    assert (await stranger.post("/v1/keys", json=body, headers=headers)).status_code == 403
    assert (await stranger.get("/v1/keys", headers=headers)).status_code == 200
    assert (await stranger.post("/v1/keys", json=body, headers={"Origin": ORIGIN})).status_code == 201
    if origin is not None:
        crossed = await stranger.post("/session", json={"key": admin_key}, headers=headers)
        assert crossed.status_code == 403


async def test_a_revoked_key_ends_its_sessions(
    app: FastAPI, client: httpx.AsyncClient, stranger: httpx.AsyncClient
) -> None:
    made = (await client.post("/v1/keys", json={"name": "ads", "scopes": ["jobs:read"]})).json()
    await log_in(stranger, made["key"])
    assert (await stranger.get("/v1/jobs")).status_code == 200
    await client.delete(f"/v1/keys/{made['id']}")
    assert (await stranger.get("/v1/jobs")).status_code == 401


async def test_sessions_expire(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(dataclasses.replace(settings, session_seconds=3600)) as app:
        app.state.authenticator = Authenticator(app.state.database, fresh_seconds=0)
        async with client_of(app) as client:
            await log_in(client, settings.admin_key_file.read_text().strip())
            client.cookies = httpx.Cookies({COOKIE: client.cookies[COOKIE]})  # the browser's own expiry aside
            assert (await client.get("/v1/jobs")).status_code == 200
            later(monkeypatch, datetime.timedelta(hours=2))
            assert (await client.get("/v1/jobs")).status_code == 401


# --- while the database is away --------------------------------------------------------------------------------------


async def test_a_known_key_outlives_the_database(app: FastAPI, admin_key: str) -> None:
    """Fetch goes on while the database is down: a key that was seen is remembered, an unknown one is not let in."""
    database = app.state.database
    authenticator = Authenticator(database, fresh_seconds=0, stale_seconds=60)
    known = await authenticator.principal("key", admin_key)
    await database.stop()
    path = Path(database.url.database)
    for file in path.parent.glob(path.name + "*"):
        file.unlink()
    path.mkdir()
    assert await authenticator.principal("key", admin_key) == known
    with pytest.raises(sa.exc.OperationalError):
        await authenticator.principal("key", "ek_00000000_unknown")
    impatient = Authenticator(database, fresh_seconds=0, stale_seconds=0)
    with pytest.raises(sa.exc.OperationalError):
        await impatient.principal("key", admin_key)


async def test_what_is_remembered_is_bounded(app: FastAPI, key_with: Callable[..., Any]) -> None:
    authenticator = Authenticator(app.state.database, size=3)
    for _ in range(5):
        assert await authenticator.principal("key", await key_with("jobs:read")) is not None
    assert len(authenticator._known) == 3


async def test_a_key_revoked_while_the_keys_are_read_is_not_remembered(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, key_with: Callable[..., Any]
) -> None:
    """What was read is from before the revocation, and would be believed for a day if the database went away."""
    authenticator = Authenticator(app.state.database)
    secret = await key_with("features:read")
    live, find = keys.live, keys.find

    async def revoked_meanwhile(ask: Any, *arguments: Any) -> Any:
        answer = await ask(*arguments)
        authenticator.forget()
        return answer

    monkeypatch.setattr(keys, "live", lambda *arguments: revoked_meanwhile(live, *arguments))
    await authenticator.inform()
    assert not authenticator._known
    monkeypatch.setattr(keys, "find", lambda *arguments: revoked_meanwhile(find, *arguments))
    assert await authenticator.principal("key", secret) is not None
    assert not authenticator._known


async def test_a_file_from_a_clock_that_ran_ahead_lengthens_nothing(app: FastAPI, tmp_path: Path) -> None:
    principal = keys.Principal("k", "name", ("features:read",))
    keys.save_known(tmp_path / "known", {"digest": principal}, time.time() + 10 * 24 * 3600)
    authenticator = Authenticator(app.state.database, file=tmp_path / "known")
    authenticator.recall()
    (known,) = authenticator._known.values()
    assert known.confirmed <= time.time()
    assert known.asked <= time.monotonic()
