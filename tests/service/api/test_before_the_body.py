"""A sender is known before its body is read, however the body is sent."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from service.api.middleware import STRANGER_BYTES
from service.core.settings import Settings

pytestmark = pytest.mark.anyio
CHUNK = b"[" * 2**14


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
    status, taken = await post(app, "/v1/jobs", {"authorization": f"Bearer {admin_key}"}, 10_000)
    assert status == 413
    assert taken == settings.max_body_bytes + len(CHUNK)


async def test_a_body_that_announces_too_much_is_refused_unread(
    app: FastAPI, admin_key: str, settings: Settings
) -> None:
    announced = {"authorization": f"Bearer {admin_key}", "content-length": str(settings.max_body_bytes + 1)}
    assert await post(app, "/v1/jobs", announced, 10_000) == (413, 0)
