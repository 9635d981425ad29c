"""Everything of the vectors routes over a store in Redis, and what is said when that is away."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis.connection import Connection

from embeddings.store import default_view, open_store
from service.api.routes.vectors import ARROW
from service.client.vectors import table_of, vectors_of
from service.core.settings import Settings
from service.features import store_health
from tests.contracts import store_servers
from tests.service import published
from tests.service.service_kit import client_of, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Any]:
    with store_servers.redis_server(tmp_path) as server:
        server.url += f"?cache={tmp_path / 'cache'}"
        yield server


@pytest.mark.process
async def test_vectors_from_redis(settings: Settings, redis: Any) -> None:
    collection = open_store(redis.url).collection("items")
    vectors = published.directions(50, 0)
    collection.create_view(default_view("items"), dim_in=published.DIM, anchor_generation=1)
    version = collection.write(published.ItemVectors(np.arange(1, 51) * 10, vectors))
    collection.publish(version, None)
    async with running(dataclasses.replace(settings, store_url=redis.url, role="api")) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            view = {"name": "raw", "collection": "items", "kind": "identity"}
            assert (await client.post("/v1/views", json=view)).status_code == 201
            url, body = "/v1/views/raw/vectors", {"ids": [20, 11, 10, 20]}
            answer = await client.post(url, json=body, headers={"Accept": ARROW})
            got = vectors_of(table_of(answer.content))
            assert (got.version, got.status.tolist()) == (version, ["found", "missing", "found", "found"])
            np.testing.assert_array_equal(got.vectors[[0, 2, 3]], vectors[[1, 0, 1]])
            again = await client.post(
                url, json=body, headers={"Accept": ARROW, "If-None-Match": answer.headers["etag"]}
            )
            assert again.status_code == 304
            # A fetch is two round trips, whatever it reads of the collection: one look, one for the rows.
            with redis.client() as asked:
                asked.config_resetstat()
                assert (await client.post("/v1/collections/items/vectors", json=body)).status_code == 200
                stats = asked.info("commandstats")
            # The second GET is the script's.
            calls = {name: stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("get", "evalsha", "mget")}
            assert calls == {"get": 2, "evalsha": 1, "mget": 0}
            default = await client.post("/v1/collections/items/vectors", json={"ids": [10]})
            assert default.json()["dim"] == 2 * published.DIM
            snapshot = await client.get(f"/v1/collections/items/versions/{version}/snapshot")
            table = pq.read_table(pa.BufferReader(snapshot.content))
            np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), vectors)
            near = (await client.post("/v1/collections/items/neighbors", json={"id": 50, "k": 3})).json()
            best = np.argsort(-(vectors @ vectors[4]))[1:4]
            assert [item["id"] for item in near["items"]] == [int(10 * (row + 1)) for row in best]
            redis.kill()
            answer = await client.post(url, json=body)
            assert answer.status_code == 503, answer.text
            assert answer.json()["type"] == "urn:evenkeel:store-unavailable"
            assert answer.headers["retry-after"].isdigit()
            assert "EVENKEEL_STORE_URL" in answer.json()["errors"][0]["remedy"]


@pytest.mark.slow
async def test_a_store_that_was_never_seen_is_not_an_empty_one(settings: Settings) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        port = bound.getsockname()[1]
        nowhere = dataclasses.replace(
            settings, store_url=f"redis://127.0.0.1:{port}/0?cache={settings.home}/cache", role="api"
        )
        async with running(nowhere) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
            for path in ("/v1/collections", "/v1/collections/items", "/v1/views", "/v1/views/wide"):
                answer = await client.get(path)
                assert answer.status_code == 503, (path, answer.text)
                assert answer.json()["type"] == "urn:evenkeel:store-unavailable"
            assert (await client.post("/v1/views/wide/vectors", json={"ids": [1]})).status_code == 503
            assert (await client.get("/healthz")).status_code == 200
            page = await client.get("/dashboard/content")
            assert page.status_code == 200, page.text
            assert "The feature store cannot be read now" in page.text


async def ready(client: Any, status_code: int, status: str) -> dict[str, Any]:
    """What /readyz says once it says so."""

    async def look() -> Any:
        answer = await client.get("/readyz")
        said = answer.json()
        return said if (answer.status_code, said.get("status")) == (status_code, status) else None

    return dict(await until(look))


@pytest.mark.process
@pytest.mark.parametrize(("role", "away"), [("api", (200, "degraded")), ("vectors", (503, 503))])
async def test_a_server_that_is_away_is_told_of_and_its_return_too(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: Any,
    away: Any,
) -> None:
    monkeypatch.setattr(store_health, "CHECK_SECONDS", 0.2)
    server = store_servers.RedisServer(tmp_path, "--requirepass", "hunter2")
    url = f"redis://:hunter2@127.0.0.1:{server.port}/0?cache={tmp_path / 'cache'}"
    async with running(settings):
        pass  # makes the database, which the role vectors does not
    try:
        async with running(dataclasses.replace(settings, store_url=url, role=role)) as app, client_of(app) as client:
            # Nobody listens there yet.
            assert (await client.get("/readyz")).status_code == away[0]

            async def said() -> bool:
                return "store: StoreUnavailable" in caplog.text

            await until(said)
            told = str(await ready(client, *away))
            assert f"redis://127.0.0.1:{server.port}/0: Redis cannot be reached" in caplog.text
            server.start()
            well = await ready(client, 200, "ok")
            assert well["checks"]["store"] == "ok"
            assert "the server answers again" in caplog.text
            open_store(url).collection("items").write(published.ItemVectors([1], published.directions(1, 0)))
            caplog.clear()
            server.kill()
            told += str(await ready(client, *away))
            assert caplog.text.count("Redis cannot be reached") == 1
            assert "its server cannot be reached: the service's log says why" in told
            assert "hunter2" not in told + caplog.text
            assert str(server.port) not in told
    finally:
        server.kill()


@pytest.mark.process
async def test_a_server_that_is_away_is_not_asked_for_each_collection(
    settings: Settings, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be refused takes seconds, for each of them: Prometheus gives up, and nobody waits for the home page."""
    monkeypatch.setattr(store_health, "CHECK_SECONDS", 0.2)
    for name in ("items", "films", "songs"):
        open_store(redis.url).collection(name).write(published.ItemVectors([1], published.directions(1, 0)))
    asked_by = set()
    connect = Connection.connect

    def noted(self: Any) -> Any:
        asked_by.add(threading.current_thread().name)
        return connect(self)

    async with running(dataclasses.replace(settings, store_url=redis.url, role="api")) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await ready(client, 200, "ok")
            for path in ("/metrics", "/dashboard/content"):
                assert "films" in (await client.get(path)).text
            redis.kill()
            await ready(client, 200, "degraded")
            monkeypatch.setattr(Connection, "connect", noted)
            metrics = await client.get("/metrics")
            assert metrics.status_code == 200
            assert "evenkeel_disk_free_bytes" in metrics.text
            assert "films" not in metrics.text
            page = await client.get("/dashboard/content")
            assert "The feature store cannot be read now" in page.text
            assert asked_by <= {"store-health"}


@pytest.mark.process
async def test_vectors_that_are_here_are_served_without_the_object_store(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_health, "CHECK_SECONDS", 0.2)
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with running(settings):
        pass
    with store_servers.s3_server() as address:
        url = f"s3://vectors/x?endpoint_override={address}&scheme=http&cache={tmp_path / 'cache'}"
        collection = open_store(url).collection("items")
        version = collection.write(published.ItemVectors([1], published.directions(1, 0)))
        collection.publish(version, None)
    async with running(dataclasses.replace(settings, store_url=url, role="vectors")) as app, client_of(app) as client:
        said = await ready(client, 200, "degraded")
        assert (
            said["checks"]["store"] == "its server cannot be reached: versions cached on this machine are still served"
        )
