"""What a run on another machine may do with its token: report on itself, once, while its attempt is the job's."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from service.core import tables
from service.core.settings import Settings
from service.identity import run_tokens
from service.jobs import job_records, run_events
from tests.service.service_kit import BOTH, client_of, job_body
from trainer.runs.events import read_events

pytestmark = pytest.mark.anyio

LINES = b'{"type":"heartbeat","attempt":1}\n{"type":"state","state":"running","attempt":1}\n'


@dataclasses.dataclass
class Attempt:
    """A claimed job whose run is elsewhere, and a client with its token."""

    job_id: str
    directory: Path
    token: str
    client: httpx.AsyncClient

    @property
    def path(self) -> str:
        return f"/internal/runs/{self.job_id}"

    async def post(self, offset: int, lines: bytes) -> httpx.Response:
        return await self.client.post(f"{self.path}/events", params={"offset": offset}, content=lines)

    @property
    def events(self) -> bytes:
        return (self.directory / "events.jsonl").read_bytes()


async def claimed(app: FastAPI, client: httpx.AsyncClient, lease: str = "lease", attempt: int = 1) -> Attempt:
    response = await client.post("/v1/jobs", json=job_body())
    assert response.status_code == 202, response.text
    job_id = response.json()["id"]
    settings: Settings = app.state.settings
    directory = settings.run_dir(job_id)
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run_id": job_id, "attempt": attempt}))
    await set_job(app, job_id, state="running", attempt=attempt, lease=lease, released=False)
    token = run_tokens.issue(settings.home, job_id, attempt, lease)
    return Attempt(job_id, directory, token, client_of(app, token))


async def set_job(app: FastAPI, job_id: str, **values: Any) -> None:
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().where(tables.job.c.id == job_id).values(**values))


@pytest.fixture
async def attempt(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> Attempt:
    return await claimed(app, client)


@BOTH
async def test_events_are_taken_in_order_and_once(attempt: Attempt) -> None:
    first, second = LINES.splitlines(keepends=True)
    assert (await attempt.post(0, first)).json() == {"offset": len(first), "token": None}
    # Something is missing before this one: it is told where to go on.
    assert (await attempt.post(len(first) + 7, second)).json()["offset"] == len(first)
    assert attempt.events == first
    # Again, because the answer was lost; and again, with more.
    assert (await attempt.post(0, first)).json()["offset"] == len(first)
    assert (await attempt.post(0, LINES)).json()["offset"] == len(LINES)
    assert (await attempt.post(len(first), second)).json()["offset"] == len(LINES)
    assert attempt.events == LINES
    assert run_events.size(attempt.directory) == len(LINES)
    assert [event.fields["type"] for event in read_events(attempt.directory)] == ["heartbeat", "state"]


async def test_a_copy_cut_by_a_crash_is_completed(attempt: Attempt) -> None:
    (attempt.directory / "events.jsonl").write_bytes(LINES[:20])
    assert (await attempt.post(0, LINES)).json()["offset"] == len(LINES)
    assert attempt.events == LINES


@pytest.mark.parametrize("lines", [b"", b"{}", b'{}\n{"type":'])
async def test_half_lines_are_refused(attempt: Attempt, lines: bytes) -> None:
    response = await attempt.post(0, lines)
    assert response.status_code == 422
    assert "complete lines" in response.text
    assert not (attempt.directory / "events.jsonl").exists()


async def test_the_run_gets_its_document_and_leaves_its_last_word(attempt: Attempt) -> None:
    assert (await attempt.client.get(attempt.path)).json()["run_id"] == attempt.job_id
    ended = {"attempt": 1, "state": "failed", "retryable": True}
    assert (await attempt.client.put(f"{attempt.path}/exit", json=ended)).status_code == 204
    assert run_events.read_exit(attempt.directory, 1) == ended
    for wrong in (b"{", b"[]", b"[" * 100_000, json.dumps(ended | {"attempt": 2}).encode()):
        assert (await attempt.client.put(f"{attempt.path}/exit", content=wrong)).status_code == 422
    assert run_events.read_exit(attempt.directory, 1) == ended


async def test_an_attempt_is_not_given_the_document_of_the_next(attempt: Attempt) -> None:
    """Which is written between the look at the row and the look at the file."""
    document = {"run_id": attempt.job_id, "attempt": 2, "lease": {"token": "another"}}
    (attempt.directory / "run.json").write_text(json.dumps(document))
    answer = await attempt.client.get(attempt.path)
    assert (answer.status_code, "another" in answer.text) == (409, False)


@BOTH
async def test_a_run_may_quote_any_character(app: FastAPI, client: httpx.AsyncClient, attempt: Attempt) -> None:
    """Refused, its last words would be sent again for half an hour."""
    said = {"attempt": 1, "state": "failed", "error": {"code": "bad-data", "message": "item 'a\x00\udcff'"}}
    line = (
        json.dumps({"attempt": 1, "type": "error", "code": "bad-data", "message": "item 'a\x00\udcff'"}).encode()
        + b"\n"
    )
    assert (await attempt.post(0, line)).status_code == 200
    assert (await attempt.client.put(f"{attempt.path}/exit", content=json.dumps(said))).status_code == 204
    assert json.loads((attempt.directory / "exit.json").read_text()) == said
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, attempt.job_id)
        await run_events.apply(connection, row, attempt.directory, True, 1.0)
    shown = (await client.get("/v1/jobs")).json()["items"][0]
    assert shown["error"]["message"] == "item 'a\ufffd\ufffd'"


async def test_an_attempt_that_was_given_up_can_write_nothing(app: FastAPI, attempt: Attempt) -> None:
    assert (await attempt.client.get(f"{attempt.path}/current")).status_code == 204
    # It failed as far as the service knows: what its ranks still say is taken, but it may not publish.
    await set_job(app, attempt.job_id, state="queued")
    assert (await attempt.client.get(f"{attempt.path}/current")).status_code == 409
    assert (await attempt.post(0, LINES)).status_code == 200
    for change in ({"lease": None}, {"lease": "other"}, {"released": True}, {"attempt": 2}):
        await set_job(app, attempt.job_id, state="running", lease="lease", released=False, attempt=1)
        assert (await attempt.client.get(f"{attempt.path}/current")).status_code == 204
        await set_job(app, attempt.job_id, **change)
        for response in (
            await attempt.client.get(f"{attempt.path}/current"),
            await attempt.client.get(attempt.path),
            await attempt.post(len(LINES), LINES),
            await attempt.client.put(f"{attempt.path}/exit", json={"attempt": 1}),
        ):
            assert response.status_code == 409, change
            assert response.json()["type"].endswith("run-given-up")
    assert attempt.events == LINES
    assert not (attempt.directory / "exit.json").exists()


async def test_a_job_that_was_deleted_takes_nothing(app: FastAPI, attempt: Attempt) -> None:
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.delete().where(tables.job.c.id == attempt.job_id))
    assert (await attempt.post(0, LINES)).status_code == 409


async def test_tokens_expire_and_are_renewed(
    attempt: Attempt, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = await attempt.post(0, LINES)
    assert response.json()["token"] is None
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + run_tokens.RENEW_SECONDS + 5)
    renewed = (await attempt.post(0, LINES)).json()["token"]
    assert renewed
    assert renewed != attempt.token
    monkeypatch.setattr("time.time", lambda: now + run_tokens.TOKEN_SECONDS + 5)
    assert (await attempt.post(0, LINES)).status_code == 401
    attempt.client.headers["Authorization"] = f"Bearer {renewed}"
    assert (await attempt.post(0, LINES)).status_code == 200


async def test_a_token_is_one_of_ours_or_none(attempt: Attempt, tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert (settings.home / run_tokens.SECRET_FILE).stat().st_mode & 0o077 == 0
    parts = attempt.token.split(".")
    forged = [
        run_tokens.issue(tmp_path / "elsewhere", attempt.job_id, 1, "lease"),
        ".".join([*parts[:1], "2", *parts[2:]]),
        attempt.token[:-1] + ("0" if attempt.token[-1] != "0" else "1"),
        attempt.token.removeprefix(run_tokens.PREFIX),
        run_tokens.PREFIX,
        "er_....",
        "",
        "er_é",
    ]
    for token in forged:
        assert run_tokens.read(settings.home, token) is None
    for token in [token for token in forged if token.isascii() and token]:
        attempt.client.headers["Authorization"] = f"Bearer {token}"
        assert (await attempt.post(0, LINES)).status_code == 401
    del attempt.client.headers["Authorization"]
    assert (await attempt.post(0, LINES)).status_code == 401
    assert not (attempt.directory / "events.jsonl").exists()


async def test_an_api_key_is_no_token_of_a_run(attempt: Attempt, client: httpx.AsyncClient) -> None:
    assert (await client.get(attempt.path)).status_code == 401


async def test_a_runs_token_opens_no_other_run_and_no_other_route(
    app: FastAPI, client: httpx.AsyncClient, attempt: Attempt
) -> None:
    """Every route of the application, with the token of one run as key: of another run, and of all that people use."""
    other = await claimed(app, client, lease="another")
    internal, seen = 0, 0
    names = {"job_id": attempt.job_id, "run_id": other.job_id}
    for route in routes_of(app):
        path = "".join(
            names.get(part[1:-1].split(":")[0], "x") if part.startswith("{") else part for part in split(route.path)
        )
        for method in sorted(route.methods - {"HEAD", "OPTIONS"}):
            response = await attempt.client.request(method, path, json={}, params={"offset": 0})
            if path.startswith("/internal/"):
                internal += 1
                assert response.status_code == 403, (method, path, response.text)
            elif path not in OPEN_TO_ALL:
                seen += 1
                assert response.status_code in (401, 403, 303), (method, path, response.status_code, response.text)
    assert internal == 4
    assert seen > 40
    assert not (other.directory / "events.jsonl").exists()
    assert (await attempt.client.get(attempt.path)).status_code == 200


# Public on purpose: no credential is asked for there.
OPEN_TO_ALL = ("/healthz", "/readyz", "/metrics", "/openapi.json", "/session", "/", "/login")


def routes_of(app: FastAPI) -> list[APIRoute]:
    routers = [route.original_router for route in app.routes if hasattr(route, "original_router")]
    return [route for router in routers for route in router.routes if isinstance(route, APIRoute)]


def split(path: str) -> list[str]:
    parts, current = [], ""
    for character in path:
        if character == "{":
            parts, current = [*parts, current], "{"
        elif character == "}":
            parts, current = [*parts, current + "}"], ""
        else:
            current += character
    return [*parts, current]


async def test_the_public_document_does_not_tell_of_them(client: httpx.AsyncClient) -> None:
    assert "/internal" not in (await client.get("/openapi.json")).text


async def test_what_cannot_be_written_is_said_and_comes_again(attempt: Attempt) -> None:
    (attempt.directory / "events.jsonl").mkdir()
    response = await attempt.post(0, LINES)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    (attempt.directory / "events.jsonl").rmdir()
    assert (await attempt.post(0, LINES)).json()["offset"] == len(LINES)


async def test_a_document_that_cannot_be_read_is_asked_for_again(attempt: Attempt) -> None:
    (attempt.directory / "run.json").unlink()
    response = await attempt.client.get(attempt.path)
    assert (response.status_code, response.headers["retry-after"]) == (503, "10")
