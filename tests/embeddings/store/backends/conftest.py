"""Servers to keep stores in, and a store in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embeddings.store import Store, open_store
from tests.contracts import store_servers


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Any]:
    import shutil

    if shutil.which("redis-server") is None:
        pytest.skip("no Redis at hand: redis-server is not installed")
    directory = tmp_path / "redis"
    directory.mkdir()
    with store_servers.redis_server(directory) as server:
        yield server


@pytest.fixture
def opened(redis_server: Any, tmp_path: Path) -> Callable[..., Store]:
    """Opens the store in ``redis_server``, each time as a process with nothing at hand."""
    numbers = itertools.count()

    def open_it(*options: str) -> Store:
        query = "&".join([f"cache={tmp_path / f'mirror{next(numbers)}'}", *options])
        return open_store(f"{redis_server.url}?{query}")

    return open_it


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in store_servers.CREDENTIALS.items():
            environment.setenv(name, value)
        with store_servers.s3_server() as address:
            yield address
