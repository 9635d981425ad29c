"""Servers for the stores that lie elsewhere, once for the session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import redis

from tests.contracts import store_servers
from tests.kube.fixtures import KubeCluster, kube_cluster

# Parts of a contract are modules that pytest does not collect.
pytest.register_assert_rewrite("tests.contracts.store")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis: EVENKEEL_TEST_REDIS_URL, the one of this machine, or one of our own; skips where there is none."""
    url = os.environ.get("EVENKEEL_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=2) as client:
            client.ping()
        yield url
    except redis.ConnectionError:
        if shutil.which("redis-server") is None:
            pytest.skip(f"no Redis at {url}, and no redis-server to start")
        with store_servers.redis_server(tmp_path_factory.mktemp("redis")) as server:
            yield server.url


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """HOST:PORT of an S3 server process with the bucket ``vectors``."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in store_servers.CREDENTIALS.items():
            environment.setenv(name, value)
        with store_servers.s3_server() as address:
            yield address


@pytest.fixture
def kubernetes() -> Iterator[KubeCluster]:
    """A Kubernetes API server of the tests' own, with KubeRay."""
    with kube_cluster() as cluster:
        yield cluster
