"""A sender is known before its body is read, however the body is sent."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.api.middleware import (
    CHECKED_ALONE_BYTES,
    DOCUMENT_BYTES,
    DOCUMENT_VALUES,
    STRANGER_BYTES,
    Limits,
    counted,
)
from service.core.settings import Settings

pytestmark = pytest.mark.anyio
CHUNK = b"x" * 2**14


async def post(app: FastAPI, path: str, headers: dict[str, str], chunks: int) -> tuple[int, int]:
    """Sends a chunked body; (status, bytes that were taken of it)."""
    taken, status = 0, 0
    left = chunks

    async def receive() -> dict[str, Any]:
        nonlocal taken, left
        left -= 1
        taken += len(CHUNK)
        return {"type": "http.request", "body": CHUNK, "more_body": left > 0}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    sent = {"host": "127.0.0.1", "transfer-encoding": "chunked", "content-type": "application/json", **headers}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80), "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    return status, taken


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer ek_00000000_wrong"},
        {"authorization": "Basic YTpi"},
        {"authorization": "Bearer "},
    ],
)
async def test_wrong_credentials_are_refused_unread(app: FastAPI, headers: dict[str, str]) -> None:
    for path in ("/v1/jobs", "/v1/datasets", "/v1/collections/items/erase", "/internal/runs/job_x/events", "/nowhere"):
        assert await post(app, path, headers, 1000) == (401, 0), path


@pytest.mark.parametrize("headers", [{}, {"cookie": "theme=dark"}, {"cookie": "evenkeel_session=none"}])
async def test_strangers_are_heard_for_64_kib(app: FastAPI, headers: dict[str, str]) -> None:
    origin = {"origin": "http://127.0.0.1", **headers}
    for path in ("/v1/jobs", "/session", "/nowhere"):
        status, taken = await post(app, path, origin, 1000)
        assert status in (401, 404, 413), path
        assert taken <= STRANGER_BYTES + len(CHUNK), path


async def test_a_key_is_heard_up_to_the_limit(app: FastAPI, admin_key: str, settings: Settings) -> None:
    key = {"authorization": f"Bearer {admin_key}"}
    assert await post(app, "/v1/jobs", key, 10_000) == (413, DOCUMENT_BYTES + len(CHUNK))
    ids = "/v1/collections/items/erase"
    assert await post(app, ids, key, 10_000) == (413, settings.max_body_bytes + len(CHUNK))


async def test_a_body_that_announces_too_much_is_refused_unread(
    app: FastAPI, admin_key: str, settings: Settings
) -> None:
    announced = {"authorization": f"Bearer {admin_key}", "content-length": str(settings.max_body_bytes + 1)}
    assert await post(app, "/v1/jobs", announced, 10_000) == (413, 0)


@pytest.mark.parametrize("value", ['"k{}":0', '"k{}":[]', '"k{}":{{}}'])
async def test_a_document_has_so_many_values(client: httpx.AsyncClient, value: str) -> None:
    per_value = 1 + value.count("[") + value.count("{{")
    fits = DOCUMENT_VALUES // per_value

    async def answer(num_values: int) -> httpx.Response:
        document = "{" + ",".join(value.format(number) for number in range(num_values)) + "}"
        return await client.post("/v1/jobs", content=document, headers={"content-type": "application/json"})

    known = await answer(fits)
    assert known.status_code == 422
    assert len(known.json()["errors"]) == 21
    refused = await answer(fits + 1)
    assert refused.status_code == 413
    assert f"{DOCUMENT_VALUES} values" in refused.json()["detail"]


async def test_long_documents_that_arrive_together_are_passed_on_one_after_another() -> None:
    turn, happened = asyncio.Lock(), []

    async def arrives() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * (CHECKED_ALONE_BYTES + 1), "more_body": False}

    async def checked() -> None:
        await counted(arrives, Limits(DOCUMENT_BYTES, DOCUMENT_VALUES), turn)()
        happened.append("checked")

    async def others() -> None:
        while happened.count("checked") < 20:
            happened.append("others")
            await asyncio.sleep(0)

    await asyncio.gather(others(), *(checked() for _ in range(20)))
    checks = [number for number, what in enumerate(happened) if what == "checked"]
    assert len(checks) == 20
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(checks))


async def test_wrong_ids_end_a_check_at_the_first(client: httpx.AsyncClient) -> None:
    for path in ("erase", "readmit"):
        response = await client.post(f"/v1/collections/items/{path}", json={"ids": [None] * 100_000, "reason": "x"})
        assert response.status_code == 422
        assert response.json()["errors"][0]["field"].startswith("ids.0")
        assert len(response.json()["errors"]) <= 2
    body = {"ids": [1], **{f"wrong{number}": 0 for number in range(50_000)}}
    response = await client.post("/v1/collections/items/vectors", json=body)
    assert response.status_code == 422
    assert len(response.json()["errors"]) == 21
