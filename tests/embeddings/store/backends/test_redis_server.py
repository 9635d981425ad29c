"""What a store in Redis survives: a server that is killed, restarted, full or empty, and a lost lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import CorruptStore, Store, StoreBusy, StoreError, StoreFull, StoreUnavailable, UnknownVersion
from embeddings.store.backends import redis_rows
from embeddings.store.files import decode_document, encode_document
from tests.embeddings.store.backends.versions import NUM_ITEMS, assert_serves, publish

pytestmark = pytest.mark.process


def test_redis_is_killed_in_mid_load(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps what it has (append-only file), dies while rows are loaded, and comes back."""
    with redis_server.client() as client:
        client.config_set("appendfsync", "always")
        client.config_set("appendonly", "yes")
        # What is there already goes to the file in the background.
        deadline = time.monotonic() + 300
        while any(client.info("persistence")[f"aof_rewrite_{word}"] for word in ("in_progress", "scheduled")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    redis_server._command += ["--appendonly", "yes", "--appendfsync", "always"]
    monkeypatch.setattr(redis_rows, "BLOCK_BYTES", NUM_ITEMS * 8 * 2 // 4)
    collection = opened("lease_seconds=6", "grace_seconds=0").collection("items")
    publish(collection, 1)
    other = opened().collection("items")
    assert_serves(other, 1)
    written = redis_rows._write_blocks

    def write_half(client: Any, keys: Any, vectors: Any, size: int) -> None:
        written(client, keys, vectors[: 2 * size], size)
        redis_server.kill()
        written(client, keys, vectors, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_rows, "_write_blocks", write_half)
        with pytest.raises(StoreUnavailable, match="hat is served is unchanged"):
            publish(collection, 2)
    assert collection.current() == "v000001"
    assert [manifest["version"] for manifest in collection.versions()] == ["v000001"]
    with pytest.raises(StoreUnavailable, match="Redis cannot be reached"):
        other.open().lookup([1])
    redis_server.start()
    # The same readers, the same connections.
    assert_serves(other, 1)
    assert_serves(collection, 1)
    assert publish(collection, 2) == "v000002"
    assert_serves(other, 2)
    # What the dead load had written is gone.
    with redis_server.client() as client:
        assert [len(client.keys(f"*:{what}*")) for what in ("info", "block:", "chunk:", "alive")] == [2, 8, 2, 2]


def test_redis_restarts_between_load_and_switch(opened: Callable[..., Store], redis_server: Any) -> None:
    """A server that was restarted may have lost rows that it had acknowledged, so nothing is committed on it."""
    collection = opened("lease_seconds=30").collection("items")
    loaded = redis_rows.load_rows

    def load_and_restart(*arguments: Any) -> None:
        loaded(*arguments)
        redis_server.kill()
        redis_server.start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embeddings.store.backends.redis.load_rows", load_and_restart)
        with pytest.raises(StoreUnavailable, match="restarted"):
            publish(collection, 1)
    assert collection.versions() == []


def test_redis_lost_rows_of_a_version(opened: Callable[..., Store], redis_server: Any) -> None:
    """What is lost of one version keeps nobody from publishing the next."""
    collection = opened().collection("items")
    publish(collection, 1)
    publish(collection, 2)
    with redis_server.client() as client:
        for key in client.scan_iter(match="*:info"):
            client.delete(key)
    with pytest.raises(UnknownVersion, match="Redis lost"):
        opened().collection("items").open()
    publish(collection, 3)
    assert_serves(opened().collection("items"), 3)


def test_redis_lost_everything(opened: Callable[..., Store], redis_server: Any) -> None:
    """The same content again, from a process that put it there before."""
    collection = opened().collection("items")
    for _ in range(2):
        with redis_server.client() as client:
            client.flushall()
        collection.create_view("wide", dim=16, dim_in=8, anchor_generation=1)
    publish(collection, 1)
    other = opened().collection("items")
    assert_serves(other, 1)
    assert other.frequencies("wide").shape == (8, 8)


@pytest.mark.parametrize("path", ["../../../planted", "/tmp/planted", "views/../../../../planted"])
def test_an_index_names_nothing_outside_the_mirror(
    opened: Callable[..., Store], redis_server: Any, tmp_path: Path, path: str
) -> None:
    publish(opened().collection("items"), 1)
    with redis_server.client() as client:
        document = decode_document(client.get("evenkeel:items:INDEX"), Path("INDEX"))
        document["files"][path] = document["files"]["CURRENT"]
        client.set("evenkeel:items:INDEX", encode_document(document))
    with pytest.raises(CorruptStore, match="no path in a collection"):
        opened().collection("items").current()
    assert list(tmp_path.rglob("planted")) == []


def test_redis_is_full(opened: Callable[..., Store], redis_server: Any) -> None:
    collection = opened().collection("items")
    publish(collection, 1)
    with redis_server.client() as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + 300_000)
    rng = np.random.default_rng(0)
    many = rng.standard_normal((30_000, 32)).astype(np.float32)
    with pytest.raises(StoreFull, match="what is served is unchanged"):
        publish(collection, 2, many)
    assert collection.current() == "v000001"
    assert_serves(collection, 1)
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(StoreError, match="evicts"):
            publish(collection, 2)
        client.config_set("maxmemory", 0)
    assert publish(collection, 2) == "v000002"


def test_a_writer_that_lost_its_lock_commits_nothing(opened: Callable[..., Store], redis_server: Any) -> None:
    collection = opened().collection("items")
    publish(collection, 1)
    loaded = redis_rows.load_rows

    def load_and_lose(*arguments: Any) -> None:
        loaded(*arguments)
        with redis_server.client() as client:
            client.set("evenkeel:items:LOCK", "another")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embeddings.store.backends.redis.load_rows", load_and_lose)
        with pytest.raises(StoreBusy, match="another writer holds the lock"):
            publish(collection, 2)
    with redis_server.client() as client:
        client.delete("evenkeel:items:LOCK")
    assert [manifest["version"] for manifest in collection.versions()] == ["v000001"]
    assert publish(collection, 2) == "v000002"


def test_a_writer_that_lost_its_lock_removes_nothing(opened: Callable[..., Store]) -> None:
    """What it would take for leftovers may be another writer's, who has not committed yet."""
    collection = opened("grace_seconds=0").collection("items")
    publish(collection, 1)
    remote = collection._files.remote
    with remote.lock() as lease:
        lease.renewed_at -= 3600.0
        with pytest.raises(StoreBusy, match="away for longer"):
            remote.sweep(set(), lease)
    assert_serves(opened().collection("items"), 1)


def test_a_lock_that_is_anothers_is_not_renewed(opened: Callable[..., Store], redis_server: Any) -> None:
    publish(opened().collection("items"), 1)
    with opened().collection("items")._files.remote.lock() as lease, redis_server.client() as client:
        client.set("evenkeel:items:LOCK", "another")
        with pytest.raises(StoreBusy, match="another writer holds the lock"):
            opened().collection("items")._files.remote.renew(lease.token)
        client.delete("evenkeel:items:LOCK")
