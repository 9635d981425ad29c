"""A real service per test: SQLite file, real store, HTTP through ASGI with the application's lifespan running."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI

from service.core.settings import Settings
from tests.service import databases, published, serving
from tests.service.service_kit import client_of, running
from tests.service.serving import Served
from tests.service.small_run import SmallRuns


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


POSTGRES = os.environ.get("EVENKEEL_TEST_POSTGRES", "postgresql+asyncpg://postgres@127.0.0.1:5432/test")


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture
def migrated() -> bool:
    """Whether the test's database is at the newest revision to begin with. Override it for one that is empty."""
    return True


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return databases.migrated_file(tmp_path_factory.mktemp("migrated"))


@pytest.fixture(scope="session")
def statements_of_migrations() -> str:
    """Skips where there is no PostgreSQL."""
    try:
        return databases.statements_of_migrations(POSTGRES)
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        pytest.skip(f"no PostgreSQL at {POSTGRES}: {error}")


@pytest.fixture
def database_url(backend: str, migrated: bool, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with _database(backend, migrated, tmp_path / "home", request) as url:
        yield url


@contextlib.contextmanager
def _database(backend: str, migrated: bool, home: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database without rows: a SQLite file, or a schema of its own on the PostgreSQL at EVENKEEL_TEST_POSTGRES."""
    if backend == "sqlite":
        file = home / "evenkeel.db"
        if migrated:
            file.parent.mkdir()
            shutil.copy(request.getfixturevalue("migrated_file"), file)
        yield f"sqlite+aiosqlite:///{file}"
        return
    schema, statements = databases.new_schema(), request.getfixturevalue("statements_of_migrations")
    databases.execute(
        POSTGRES, f"CREATE SCHEMA {schema}; SET search_path TO {schema}; {statements if migrated else ''}"
    )
    yield f"{POSTGRES}?search_path={schema}"
    databases.execute(POSTGRES, f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture
def grace_seconds() -> float:
    """What a cancelled run has to end itself, however busy the machine is. Little, by ``parametrize``, for one that
    does not listen."""
    return 60.0


@pytest.fixture
def settings(tmp_path: Path, database_url: str, grace_seconds: float) -> Settings:
    return _settings(tmp_path, database_url, grace_seconds)


def _settings(folder: Path, database_url: str, grace_seconds: float) -> Settings:
    data = folder / "data"
    data.mkdir()
    return Settings(
        home=folder / "home",
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service process for the tests of a module."""
    with serving.serving(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def data_file(settings: Settings) -> Path:
    return _ratings(settings)


def _ratings(settings: Settings) -> Path:
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
    return _dataset_body(data_file)


def _dataset_body(data_file: Path) -> dict[str, Any]:
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


# --- what the tests of a module share that change nothing ------------------------------------------------------------


@pytest.fixture(scope="module")
def reading_settings(
    backend: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Settings]:
    folder = tmp_path_factory.mktemp("reading")
    with _database(backend, True, folder / "home", request) as url:
        yield _settings(folder, url, grace_seconds=60.0)


@pytest.fixture(scope="module")
async def reading(reading_settings: Settings, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the admin key of one application with the dataset ``ratings``, for tests that leave all as it was:
    those that read, and those whose requests are refused."""
    async with running(reading_settings) as app:
        async with client_of(app, reading_settings.admin_key_file.read_text().strip()) as client:
            response = await client.post("/v1/datasets", json=_dataset_body(_ratings(reading_settings)))
            assert response.status_code == 201, response.text
            yield client


@pytest.fixture(scope="module")
def items(reading_settings: Settings) -> tuple[str, np.ndarray]:
    """The version and the vectors that ``reading`` serves of the collection ``items``."""
    return published.publish(reading_settings)
