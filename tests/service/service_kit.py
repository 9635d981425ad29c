"""What the service's tests share: a client over ASGI, a job's body, waiting, writers that race in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncConnection

from service.app import create_app
from service.core.database import Database
from service.core.settings import Settings
from service.core.tenants import HEADER

ORIGIN = "http://127.0.0.1:8080"
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
"""Runs a test (or, as ``pytestmark``, a module) on each kind of database."""


def client_of(app: FastAPI, key: str | None = None, **options: Any) -> httpx.AsyncClient:
    """An HTTP client of ``app``; errors of the app come back as its 500, as over a socket."""
    transport = httpx.ASGITransport(
        app=app, raise_app_exceptions=False, client=options.pop("peer", ("127.0.0.1", 1234))
    )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=transport, base_url=ORIGIN, headers=headers, **options)


@contextlib.asynccontextmanager
async def running(settings: Settings, **options: Any) -> AsyncIterator[FastAPI]:
    """The application with its lifespan entered. On leaving, waits for the threads of connections that failed: they
    answer to this event loop, and one that is closed would fail them within a later test."""
    global _num_running
    before = _connection_threads()
    app = create_app(settings, **options)
    _num_running += 1
    try:
        async with app.router.lifespan_context(app):
            yield app
    finally:
        _num_running -= 1
    deadline = time.monotonic() + 10
    while _num_running == 0 and _connection_threads() - before and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


_num_running = 0


def _connection_threads() -> set[threading.Thread]:
    """aiosqlite's, one a connection."""
    return {thread for thread in threading.enumerate() if "_connection_worker_thread" in thread.name}


def job_body(behave: str = "succeed", **fields: Any) -> dict[str, Any]:
    """A JobSpec whose run behaves as asked (small_run_process.py)."""
    labels = {"behave": behave, **fields.pop("labels", {})}
    return {"name": "small", "dataset": {"name": "ratings"}, "model": {"kind": "two_tower"}, "labels": labels, **fields}


async def submit(client: httpx.AsyncClient, behave: str = "succeed", tenant: str = "", **fields: Any) -> dict[str, Any]:
    """Submit :func:`job_body`, for a tenant or for that of the client's key; return the job."""
    headers = {HEADER: tenant} if tenant else {}
    response = await client.post("/v1/jobs", json=job_body(behave, **fields), headers=headers)
    assert response.status_code == 202, response.text
    return dict(response.json())


async def until(look: Callable[[], Awaitable[Any]], seconds: float = 300.0) -> Any:
    """The first true value of ``look``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = await look()
        if value:
            return value
        assert time.monotonic() < deadline, f"nothing came within {seconds} s"
        await asyncio.sleep(0.03)


async def waits_for(database: Database, connection: AsyncConnection) -> bool:
    """Whether anybody waits for a lock that this PostgreSQL connection holds."""
    holder = await connection.scalar(sa.text("SELECT pg_backend_pid()"))
    query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE :holder = ANY(pg_blocking_pids(pid))")
    async with database.read() as another:
        return bool(await another.scalar(query, {"holder": holder}))


async def state_of(client: httpx.AsyncClient, job_id: str) -> str:
    return str((await client.get(f"/v1/jobs/{job_id}")).json()["state"])


async def wait_for(client: httpx.AsyncClient, job_id: str, *states: str) -> dict[str, Any]:
    """The job, once it is in one of these states."""

    async def look() -> Any:
        job = (await client.get(f"/v1/jobs/{job_id}")).json()
        return job if job["state"] in states else None

    return dict(await until(look))
