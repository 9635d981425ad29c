"""A real service per test: SQLite file, real store, HTTP through ASGI with the application's lifespan running."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI

from service.settings import Settings

# Tests are collected by path (importmode importlib): the helpers beside them need this to be importable.
sys.path.insert(0, str(Path(__file__).parent))

from service_kit import client_of, running
from small_run import SmallRuns


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


POSTGRES = os.environ.get("EVENKEEL_TEST_POSTGRES", "postgresql+asyncpg://postgres@127.0.0.1:5432/test")


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture
def database_url(backend: str, tmp_path: Path) -> Iterator[str]:
    """An empty database: a SQLite file, or a schema of its own on the PostgreSQL at EVENKEEL_TEST_POSTGRES."""
    if backend == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'home' / 'evenkeel.db'}"
        return
    schema = f"evenkeel_{uuid.uuid4().hex[:12]}"

    async def execute(statement: str) -> None:
        connection = await asyncpg.connect(POSTGRES.replace("+asyncpg", ""), timeout=300)
        await connection.execute(statement)
        await connection.close()

    try:
        asyncio.run(execute(f"CREATE SCHEMA {schema}"))
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        pytest.skip(f"no PostgreSQL at {POSTGRES}: {error}")
    yield f"{POSTGRES}?search_path={schema}"
    asyncio.run(execute(f"DROP SCHEMA {schema} CASCADE"))


@pytest.fixture
def grace_seconds() -> float:
    """What a cancelled run has to end itself, however busy the machine is. Little, by ``parametrize``, for one that
    does not listen."""
    return 60.0


@pytest.fixture
def settings(tmp_path: Path, database_url: str, grace_seconds: float) -> Settings:
    data = tmp_path / "data"
    data.mkdir()
    return Settings(
        home=tmp_path / "home",
        database_url=database_url,
        data_roots=(data,),
        follow_seconds=0.05,
        schedule_seconds=0.05,
        retry_backoff_seconds=0.05,
        cancel_grace_seconds=grace_seconds,
        role="api",
    )


@pytest.fixture
async def app(settings: Settings, anyio_backend: str) -> AsyncIterator[FastAPI]:
    async with running(settings) as app:
        yield app


@pytest.fixture
def admin_key(app: FastAPI, settings: Settings) -> str:
    return settings.admin_key_file.read_text().strip()


@pytest.fixture
async def client(app: FastAPI, admin_key: str) -> AsyncIterator[httpx.AsyncClient]:
    """With the admin key."""
    async with client_of(app, admin_key) as client:
        yield client


@pytest.fixture
async def stranger(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Without any key."""
    async with client_of(app) as client:
        yield client


@pytest.fixture
def key_with(client: httpx.AsyncClient) -> Callable[..., Any]:
    """Makes a key that has just these scopes."""

    async def make(*scopes: str) -> str:
        response = await client.post("/v1/keys", json={"name": "test", "scopes": list(scopes)})
        assert response.status_code == 201, response.text
        return str(response.json()["key"])

    return make


@pytest.fixture
def runs() -> Iterator[SmallRuns]:
    """An executor of small runs; what a test leaves running ends with it."""
    executor = SmallRuns()
    yield executor
    executor.end_all()


@pytest.fixture
async def service(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> AsyncIterator[httpx.AsyncClient]:
    """A whole service, runner and scheduler included, with the dataset ``ratings``; its client has the admin key."""
    async with running(dataclasses.replace(settings, role="all"), executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            response = await client.post("/v1/datasets", json=dataset_body)
            assert response.status_code == 201, response.text
            yield client


@pytest.fixture
def data_file(settings: Settings) -> Path:
    """Twelve ratings under the data root."""
    path = settings.data_roots[0] / "ratings.parquet"
    table = {
        "user": [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6],
        "item": [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3],
        "rating": [5, 3, 4, 1, 5, 2, 4, 4, 3, 5, 1, 2],
        "date": ["2026-01-01"] * 6 + ["2026-01-02"] * 6,
    }
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture
def dataset_body(data_file: Path) -> dict[str, Any]:
    return {
        "name": "ratings",
        "uri": str(data_file),
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"rule": "rating >= 4"},
        "partition": "date",
    }


@pytest.fixture
async def dataset(client: httpx.AsyncClient, dataset_body: dict[str, Any]) -> str:
    """A registered dataset's name."""
    response = await client.post("/v1/datasets", json=dataset_body)
    assert response.status_code == 201, response.text
    return str(dataset_body["name"])


@pytest.fixture(scope="session")
def published() -> Any:
    """``published.publish(settings)`` and the like: real versions in a real store (tests/service/published.py)."""
    spec = importlib.util.spec_from_file_location("published", Path(__file__).with_name("published.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
