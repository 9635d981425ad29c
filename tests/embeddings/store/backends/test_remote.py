"""What the stores elsewhere survive: servers that are killed, writers that are, damage, and readers all the while."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest

from embeddings.store import (
    Collection,
    CorruptStore,
    Store,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnknownVersion,
    open_store,
)
from embeddings.store.backends import redis, redis_packed, redis_protocol, redis_rows
from embeddings.store.files import decode_document, encode_document
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors
from tests.contracts import store_servers

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[4]

NUM_ITEMS = 3000


def vectors_of(number: int, num_items: int = NUM_ITEMS, dim: int = 8) -> np.ndarray:
    return np.full((num_items, dim), float(number), dtype=np.float32)


def publish(collection: Collection, number: int, vectors: np.ndarray | None = None, ids: Any = None) -> str:
    vectors = vectors_of(number) if vectors is None else vectors
    parent = collection.current()
    content = ItemVectors(np.arange(len(vectors)) if ids is None else ids, vectors)
    version = collection.write(content, parent=parent, dtype="float16")
    collection.publish(version, parent)
    return version


def assert_serves(collection: Collection, number: int) -> None:
    status, vectors = collection.open().lookup(np.arange(NUM_ITEMS))
    assert (status == FOUND).all()
    assert (vectors == number).all()


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


# --- Redis: rows -----------------------------------------------------------------------------------------------------


def num_rows(server: Any) -> int:
    with server.client() as client:
        return len(list(client.scan_iter(match="evenkeel:.*", count=10_000)))


@pytest.mark.parametrize(
    "ids",
    [
        [-(2**63), -1, 0, 7, 10, 123456, 2**63 - 1],
        ["", "a", "ab", "日本", "a b\r\n$3", "x" * 512],
    ],
)
def test_ids_of_all_lengths(opened: Callable[..., Store], ids: list[Any]) -> None:
    content = np.arange(4 * len(ids), dtype=np.float32).reshape(len(ids), 4)
    collection = opened().collection("items")
    version = collection.write(ItemVectors(ids, content))
    collection.publish(version, None)
    nobody: Any = 5 if isinstance(ids[0], int) else "nobody"
    status, vectors = opened().collection("items").open().lookup([nobody, *ids[::-1], ids[0]])
    assert status.tolist() == [MISSING, *[FOUND] * (len(ids) + 1)]
    np.testing.assert_array_equal(vectors, [np.zeros(4), *content[::-1], content[0]])


def wait_for_none(server: Any, pattern: str | bytes, but: int = 0) -> None:
    """Until Redis has let go of all keys like ``pattern``, ``but`` some."""
    deadline = time.monotonic() + 20
    with server.client() as client:
        while len(client.keys(pattern)) > but:
            assert time.monotonic() < deadline, client.keys(pattern)
            time.sleep(0.05)


def commands(server: Any, call: Callable[[], Any]) -> dict[str, int]:
    """How often each command was asked for by ``call``."""
    with server.client() as client:
        client.config_resetstat()
        call()
        asked = client.info("commandstats")
    return {name[8:]: one["calls"] for name, one in asked.items() if name[8:] not in ("config|resetstat", "info")}


def test_a_lookup_is_one_round_trip(opened: Callable[..., Store], redis_server: Any) -> None:
    ours, other = opened("grace_seconds=0").collection("items"), opened().collection("items")
    publish(ours, 1)
    other.lookup([1])
    assert commands(redis_server, lambda: other.lookup(np.arange(NUM_ITEMS))) == {"mget": 1}
    publish(ours, 2)
    # Asked in vain once, then as when it is seen for the first time, then in one again.
    assert (other.lookup(np.arange(NUM_ITEMS))[2] == 2).all()
    assert commands(redis_server, lambda: other.lookup([1])) == {"mget": 1}
    assert commands(redis_server, lambda: other.open().lookup([1])) == {"get": 1, "mget": 1}

    def several() -> None:
        with other.snapshot_read():
            assert other.exists()
            assert other.open().version == other.current() == "v000002"

    assert commands(redis_server, several) == {"get": 1}


def test_what_goes_between_a_look_and_its_use(opened: Callable[..., Store], redis_server: Any) -> None:
    ours, other = opened("grace_seconds=0").collection("items"), opened().collection("items")
    publish(ours, 1)
    with other.snapshot_read():
        assert other.current() == "v000001"
        publish(ours, 2)
        ours.retain(1)
        wait_for_none(redis_server, "*:info", but=1)
        assert other.open().version == "v000002"
        with pytest.raises(UnknownVersion):
            other.open("v000001")


def test_packed_rows(opened: Callable[..., Store], redis_server: Any) -> None:
    """One round trip of ranges; readers of either layout read both; a version that goes takes its blocks along."""
    packed, keyed = opened("rows=packed", "grace_seconds=0").collection("items"), opened().collection("items")
    vectors = np.random.default_rng(0).standard_normal((NUM_ITEMS, 400)).astype(np.float16).astype(np.float32)
    publish(packed, 1, vectors)
    with redis_server.client() as client:
        assert len(client.keys("*:block:*")) == 2
    assert num_rows(redis_server) == 0
    rows = np.random.default_rng(1).permutation(2 * NUM_ITEMS)
    for reader in (packed, keyed, opened("rows=packed").collection("items")):
        version, status, found = reader.lookup(rows)
        assert version == "v000001"
        np.testing.assert_array_equal(status == FOUND, rows < NUM_ITEMS)
        np.testing.assert_array_equal(found[rows < NUM_ITEMS], vectors[rows[rows < NUM_ITEMS]])
        assert not found[rows >= NUM_ITEMS].any()
        np.testing.assert_array_equal(reader.open().vectors, vectors)
    # Blocks are as long as their writer says, whatever this release would make.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_packed, "BLOCK_BYTES", 4000)
        np.testing.assert_array_equal(opened().collection("items").lookup([NUM_ITEMS - 1])[2], vectors[[-1]])
    # One MGET behind each part of 2048.
    assert commands(redis_server, lambda: packed.lookup(rows)) == {"getrange": NUM_ITEMS, "mget": 2}
    assert commands(redis_server, lambda: packed.lookup([-1])) == {"mget": 1}
    # A delta rests on keys of rows alone, whatever lies under other keys.
    with redis_server.client() as client:
        whole = redis_rows.row_values(vectors.astype(np.float16), np.full(NUM_ITEMS, FOUND, dtype=np.uint8))
        client.mset({str(item): row.tobytes() for item, row in enumerate(whole)})
    publish(keyed, 2, vectors)
    assert num_rows(redis_server) == NUM_ITEMS
    publish(packed, 3, vectors + 1)
    packed.retain(1)
    wait_for_none(redis_server, "evenkeel:items:*:block:*", but=2)
    wait_for_none(redis_server, "evenkeel:.*")
    np.testing.assert_array_equal(keyed.lookup([5])[2], (vectors[[5]] + 1).astype(np.float16))


def test_packed_rows_that_are_gone(opened: Callable[..., Store], redis_server: Any) -> None:
    """A block or ``alive`` is lost, or a block is another: an error, and never zeros or a wait without an end."""
    collection = opened("rows=packed").collection("items")
    publish(collection, 1, np.random.default_rng(0).standard_normal((NUM_ITEMS, 400)).astype(np.float32))
    collection.lookup([1])
    with redis_server.client() as client:
        (alive,), blocks = client.keys("*:alive"), sorted(client.keys("*:block:*"))
        for key in (blocks[1], blocks[0], alive):
            kept = client.get(key)
            client.delete(key)
            with pytest.raises(UnknownVersion, match="gone"):
                collection.open().lookup(np.arange(NUM_ITEMS))
            if key != alive:
                with pytest.raises(UnknownVersion, match="gone"):
                    opened().collection("items").open().vectors  # noqa: B018
                client.set(key, kept[:-100])
                with pytest.raises(UnknownVersion, match="gone"):
                    collection.open().lookup(np.arange(NUM_ITEMS))
            client.set(key, kept)
            assert (collection.open().lookup(np.arange(NUM_ITEMS))[0] == FOUND).all()
    redis_server.kill()
    with pytest.raises(StoreUnavailable):
        collection.open("v000001").lookup([1])


@pytest.mark.parametrize("rows", ["keys", "packed"])
def test_a_server_that_does_not_answer(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    monkeypatch.setattr(redis, "_SOCKET_SECONDS", 0.1)
    collection = opened(f"rows={rows}").collection("items")
    publish(collection, 1)
    reader = collection.open()
    assert reader.lookup([1])[1][0, 0] == 1
    with redis_server.client() as client:
        client.client_pause(4_000)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            reader.lookup([1])
        client.ping()
    assert reader.lookup([1])[1][0, 0] == 1


def test_the_layout_is_one_of_two(opened: Callable[..., Store]) -> None:
    with pytest.raises(ValueError, match="rows is 'both', expected keys or packed"):
        opened("rows=both")


def test_rows_of_an_earlier_release_are_served_and_removed(opened: Callable[..., Store], redis_server: Any) -> None:
    collection = opened("grace_seconds=0").collection("items")
    publish(collection, 1)
    with redis_server.client() as client:
        (name,) = client.keys("*:info")
        base, info = name[: -len(b":info")], json.loads(client.get(name))
        rows = info.pop("row_keys").encode()
        for key in client.keys(rows + b"*"):
            client.rename(key, base + b":id:" + key[len(rows) :])
        client.set(name, json.dumps(info))
        assert_serves(opened().collection("items"), 1)
        publish(collection, 2)
        collection.retain(1)
        assert_serves(opened().collection("items"), 2)
        wait_for_none(redis_server, base + b":id:*")


def test_a_version_that_differs_little_shares_its_rows(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_rows, "CHUNK_ROWS", 512)
    collection = opened("grace_seconds=0").collection("items")
    ids = np.arange(0, 2 * NUM_ITEMS, 2)
    first = np.random.default_rng(0).standard_normal((NUM_ITEMS, 8)).astype(np.float16).astype(np.float32)
    publish(collection, 1, first, ids)
    assert num_rows(redis_server) == NUM_ITEMS
    # One is changed, one is new, one is gone; twice, so that the second delta rests on the first version too.
    second, third = first.copy(), first.copy()
    second[5] = 9.0
    publish(collection, 2, second, ids)
    assert num_rows(redis_server) == NUM_ITEMS + 1
    third_ids = ids.copy()
    third_ids[7] = 15
    publish(collection, 3, third, third_ids)
    assert num_rows(redis_server) == NUM_ITEMS + 3

    def assert_version(version: str, its_ids: np.ndarray, its_vectors: np.ndarray) -> None:
        reader = opened().collection("items").open(version)
        asked = np.arange(2 * NUM_ITEMS)
        status, vectors = reader.lookup(asked)
        np.testing.assert_array_equal(asked[status == FOUND], its_ids)
        np.testing.assert_array_equal(vectors[status == FOUND], its_vectors)
        np.testing.assert_array_equal(reader.keys, its_ids)
        np.testing.assert_array_equal(np.asarray(reader.items().vectors), its_vectors)

    for version, its_ids, its_vectors in (
        ("v000001", ids, first), ("v000002", ids, second), ("v000003", third_ids, third)
    ):  # fmt: skip
        assert_version(version, its_ids, its_vectors)

    # What others rest on stays when its own version goes, and goes with the last of them.
    assert collection.retain(1) == ["v000001", "v000002"]
    assert num_rows(redis_server) == NUM_ITEMS + 2
    assert_version("v000003", third_ids, third)
    publish(collection, 4, np.random.default_rng(1).standard_normal((NUM_ITEMS, 8)).astype(np.float32), ids)
    publish(collection, 5, np.random.default_rng(2).standard_normal((NUM_ITEMS, 8)).astype(np.float32), ids)
    assert collection.retain(1) == ["v000003", "v000004"]
    assert num_rows(redis_server) == NUM_ITEMS


def test_erased_rows_leave_what_others_rest_on(opened: Callable[..., Store], redis_server: Any) -> None:
    collection = opened("grace_seconds=0").collection("items")
    publish(collection, 1)
    changed = vectors_of(1)
    changed[3] = 2.0
    publish(collection, 2, changed)
    collection.erase([3, 4], "asked for")
    with redis_server.client() as client:
        assert not [key for key in client.scan_iter(match="evenkeel:.*", count=10_000) if key.endswith((b":3", b":4"))]
    for version in ("v000001", "v000002"):
        status, vectors = opened().collection("items").open(version).lookup([3, 4, 5])
        assert status.tolist() == [MISSING, MISSING, FOUND]
        assert (vectors[2] == 1).all()


def test_erased_rows_leave_what_a_version_without_them_rests_on(
    opened: Callable[..., Store], redis_server: Any
) -> None:
    """The second version has no row of the id, and is rewritten all the same: its other rows are in the first one's."""
    collection = opened("grace_seconds=0").collection("items")
    publish(collection, 1)
    ids = np.delete(np.arange(NUM_ITEMS), 3)
    publish(collection, 2, vectors_of(1)[ids], ids)
    assert num_rows(redis_server) == NUM_ITEMS + 1  # with a tombstone
    collection.erase([3], "asked for")
    with redis_server.client() as client:
        assert not list(client.scan_iter(match="evenkeel:*:3", count=10_000))
    status, vectors = opened().collection("items").lookup([3, 4])[1:]
    assert status.tolist() == [MISSING, FOUND]
    assert (vectors[1] == 1).all()


def test_rows_outlive_their_version_by_the_grace(opened: Callable[..., Store]) -> None:
    collection = opened("grace_seconds=600").collection("items")
    for number in (1, 2, 3):
        publish(collection, number)
    pinned = opened().collection("items").open("v000002")
    collection.promote("v000001", "anchors stay")
    publish(collection, 4)
    collection.expire("v000002")
    assert (pinned.lookup([1, 2])[1] == 2).all()
    with pytest.raises(UnknownVersion, match="expired"):
        opened().collection("items").open("v000002")
    hasty = opened("grace_seconds=0").collection("items")
    pinned = hasty.open("v000003")
    hasty.expire("v000003")
    # Never missing instead of gone.
    with pytest.raises(UnknownVersion, match="gone"):
        pinned.lookup([1, 2])


# --- Redis: the server -----------------------------------------------------------------------------------------------


def test_redis_is_killed_in_mid_load(tmp_path: Path, opened: Callable[..., Store], redis_server: Any) -> None:
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
    collection = opened("lease_seconds=6", "grace_seconds=0").collection("items")
    publish(collection, 1)
    other = opened().collection("items")
    assert_serves(other, 1)
    sent = redis_protocol.Loader.send_rows

    def send_half(self: Any, prefix: bytes, ids: Any, values: Any) -> None:
        sent(self, prefix, ids[: len(ids) // 2], values[: len(ids) // 2])
        redis_server.kill()
        sent(self, prefix, ids[len(ids) // 2 :], values[len(ids) // 2 :])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_protocol.Loader, "send_rows", send_half)
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
    assert num_rows(redis_server) == 2 * NUM_ITEMS


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
        with pytest.raises(StoreBusy, match="lock is another's"):
            publish(collection, 2)
    with redis_server.client() as client:
        client.delete("evenkeel:items:LOCK")
    assert [manifest["version"] for manifest in collection.versions()] == ["v000001"]
    assert publish(collection, 2) == "v000002"


# --- writers that are killed -----------------------------------------------------------------------------------------

_WRITER = """
import sys
import numpy as np
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
collection = open_store(sys.argv[1]).collection("items")
print("ready", flush=True)
while True:
    parent = collection.current()
    number = 1 + max(int(manifest["version"][1:]) for manifest in collection.versions())
    vectors = np.full((3000, 8), float(number))
    version = collection.write(ItemVectors(np.arange(3000), vectors), parent=parent)
    assert int(version[1:]) == number, version
    collection.publish(version, parent)
    collection.retain(3)
"""


def killed_writers(url: str, mirror: Path, collection: Collection, unlock: Callable[[], None], seed: int) -> None:
    """Starts a writer that publishes on and on, kills it at a random moment, and looks at what is served; so many times
    as EVENKEEL_TEST_KILLS says."""
    num_kills = int(os.environ.get("EVENKEEL_TEST_KILLS", "5"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    moments = np.random.default_rng(seed).uniform(0.0, 0.4, num_kills)
    for moment in moments:
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, f"{url}cache={mirror}"], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        unlock()
        reader = collection.open()
        number = float(int(reader.version[1:]))
        status, vectors = reader.lookup(np.arange(NUM_ITEMS))
        assert (status == FOUND).all()
        assert np.unique(vectors).tolist() == [number], reader.version


@pytest.mark.long
def test_writers_killed_at_random_points_embedded(tmp_path: Path) -> None:
    root = tmp_path / "store"
    collection = open_store(root).collection("items")
    collection.publish(collection.write(ItemVectors(np.arange(NUM_ITEMS), vectors_of(1))), None)
    killed_writers(f"file://{root}?", Path("unused"), collection, lambda: None, seed=0)
    collection.clean()
    assert list(root.rglob(".*")) == []


@pytest.mark.long
def test_writers_killed_at_random_points_redis(opened: Callable[..., Store], redis_server: Any, tmp_path: Path) -> None:
    collection = opened("grace_seconds=0").collection("items")
    collection.publish(collection.write(ItemVectors(np.arange(NUM_ITEMS), vectors_of(1))), None)

    def unlock() -> None:
        # Its lease would end by itself.
        with redis_server.client() as client:
            client.delete("evenkeel:items:LOCK")

    killed_writers(f"{redis_server.url}?grace_seconds=60&", tmp_path / "writer", collection, unlock, seed=1)
    # The next writer cleans up.
    after = publish(collection, int(str(collection.current())[1:]) + 1)
    collection.retain(1)
    collection.clean()
    assert collection.open().version == after


# --- object storage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in store_servers.CREDENTIALS.items():
            environment.setenv(name, value)
        with store_servers.s3_server() as address:
            yield address


def in_objects(address: str, tmp_path: Path, mirror: str, *options: str) -> Collection:
    query = "&".join([f"endpoint_override=http://{address}", f"cache={tmp_path / mirror}", *options])
    return open_store(f"s3://vectors/{tmp_path.name}?{query}").collection("items")


def objects(address: str, tmp_path: Path) -> dict[str, str]:
    files = pafs.S3FileSystem(endpoint_override=address, scheme="http")
    found = files.get_file_info(pafs.FileSelector(f"vectors/{tmp_path.name}", recursive=True))
    return {info.path.partition("/items/")[2]: info.path for info in found if info.type == pafs.FileType.File}


def test_a_damaged_object_is_refused(s3_address: str, tmp_path: Path) -> None:
    collection = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    publish(collection, 1)
    publish(collection, 2)
    files = pafs.S3FileSystem(endpoint_override=s3_address, scheme="http")
    (path,) = [
        path for name, path in objects(s3_address, tmp_path).items() if name.startswith("versions/v000002/items")
    ]
    with files.open_input_stream(path) as source:
        content = bytearray(source.readall())
    content[len(content) // 2] ^= 0x10
    with files.open_output_stream(path) as target:
        target.write(bytes(content))
    other = in_objects(s3_address, tmp_path, "b", "follow_seconds=0")
    with pytest.raises(CorruptStore, match="sha256 is not the index's"):
        other.open("v000002")
    assert other.open().version == "v000001"
    assert "v000002" in other.damaged()
    # Readers that have the file are not concerned.
    assert_serves(collection, 2)
    # A damaged file of a mirror is fetched again.
    (file,) = (tmp_path / "b").rglob("v000001/items.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
    again = in_objects(s3_address, tmp_path, "b")
    assert (again.open("v000001").lookup([1])[1] == 1).all()


def test_a_store_that_is_away_is_served_from_the_mirror(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in store_servers.CREDENTIALS.items():
            environment.setenv(name, value)
        with store_servers.s3_server() as address:
            collection = in_objects(address, tmp_path, "a", "follow_seconds=0")
            publish(collection, 1)
            follower = in_objects(address, tmp_path, "b", "follow_seconds=0")
            assert_serves(follower, 1)
        assert_serves(follower, 1)
        # A process that is started while the store is away, too.
        assert_serves(in_objects(address, tmp_path, "b"), 1)
        with pytest.raises(StoreUnavailable, match="is served is unchanged"):
            publish(collection, 2)
        assert collection.current() == "v000001"
        with pytest.raises(StoreUnavailable):
            in_objects(address, tmp_path, "c").current()


def test_one_waits_for_a_store_that_hangs(s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    publish(collection, 1)
    asked, over = threading.Event(), threading.Event()
    calls = []

    def hangs() -> bytes | None:
        calls.append(threading.get_ident())
        if len(calls) > 1:
            asked.set()
            over.wait(300)
        raise StoreUnavailable("it hangs")

    monkeypatch.setattr(collection._files.remote, "index", hangs)
    assert collection.current() == "v000001"
    collection._files.next_look = 0.0
    waiting = threading.Thread(target=collection.current)
    waiting.start()
    try:
        assert asked.wait(300)
        assert_serves(collection, 1)
        assert len(calls) == 2
    finally:
        over.set()
        waiting.join()


def test_an_index_that_is_old_by_the_time_of_the_lock(
    s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share a mirror: one has read the index, and the other publishes before it gets to the lock."""
    writer = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    follower = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    publish(writer, 1)
    original = follower._files.remote.index
    read = []

    def overtaken() -> bytes | None:
        read.append(original())
        if len(read) == 1:
            writer.write(ItemVectors(np.arange(NUM_ITEMS), vectors_of(2)), parent="v000001")
        return read[-1]

    monkeypatch.setattr(follower._files.remote, "index", overtaken)
    assert follower.current() == "v000001"
    assert (writer.directory / "versions/v000002/manifest.json").exists()


def test_processes_share_a_mirror(s3_address: str, tmp_path: Path) -> None:
    """One of them has brought it up to date before the other looks."""
    first = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    late = in_objects(s3_address, tmp_path, "a", "follow_seconds=600")
    writer = in_objects(s3_address, tmp_path, "b", "follow_seconds=0")
    publish(writer, 1)
    assert_serves(late, 1)
    publish(writer, 2)
    assert first.current() == "v000002"
    assert_serves(late, 2)
    assert late.damaged() == {}


def test_processes_share_a_mirror_of_rows(redis_server: Any, tmp_path: Path) -> None:
    url = f"{redis_server.url}?cache={tmp_path / 'mirror'}"
    late = open_store(f"{url}&follow_seconds=600").collection("items")
    writer = open_store(url).collection("items")
    publish(writer, 1)
    assert_serves(late, 1)
    publish(writer, 2)
    assert_serves(late, 2)
    assert late.damaged() == {}


def test_a_dead_writer_of_objects_is_cleaned_up(s3_address: str, tmp_path: Path) -> None:
    collection = in_objects(s3_address, tmp_path, "a", "follow_seconds=0", "lease_seconds=6")
    publish(collection, 1)
    before = set(objects(s3_address, tmp_path))
    # What one leaves that dies between its objects and the index, and its mark.
    files = pafs.S3FileSystem(endpoint_override=s3_address, scheme="http")
    for name in ("versions/v000002/items-0123456789abcdef.arrow", "LOCKS/dead"):
        with files.open_output_stream(f"vectors/{tmp_path.name}/collections/items/{name}") as target:
            target.write(b"half")
    assert publish(collection, 2) == "v000002"
    after = set(objects(s3_address, tmp_path))
    assert "versions/v000002/items-0123456789abcdef.arrow" not in after
    assert not [name for name in after if name.startswith("LOCKS/")]
    assert before - after == {name for name in before if name.startswith("CURRENT-")}


def test_a_bucket_that_is_not_there(s3_address: str, tmp_path: Path) -> None:
    url = f"s3://nowhere/x?endpoint_override=http://{s3_address}&cache={tmp_path}"
    with pytest.raises(StoreUnavailable, match="the bucket exists"):
        publish(open_store(url).collection("items"), 1)


# --- locks -----------------------------------------------------------------------------------------------------------


def test_a_lock_that_is_taken_and_a_lock_that_ended(redis_server: Any, tmp_path: Path) -> None:
    from embeddings.store.backends.redis import InRedis, connect
    from embeddings.store.lease import leased
    from embeddings.store.url import parse_store_url

    url = parse_store_url(f"{redis_server.url}?cache={tmp_path}", 0.0, ())
    lock = InRedis(connect(url.address), "p:", "items", url, 0.0)
    with leased(lock, "one", 30.0, "here") as lease:
        lease.check()
        with pytest.raises(StoreBusy, match="has kept the writer lock"):
            with leased(lock, "two", 30.0, "here", timeout_seconds=0.05):
                pass
        lease.renewed_at -= 31.0
        with pytest.raises(StoreBusy, match="away for longer"):
            lease.check()
    with leased(lock, "two", 30.0, "here", timeout_seconds=0.05):
        pass


class Renewals:
    """A lock that is free."""

    def __init__(self) -> None:
        self.renewed = threading.Event()

    def acquire(self, token: str) -> bool:
        return True

    def renew(self, token: str) -> None:
        self.renewed.set()

    def release(self, token: str) -> None:
        pass


def test_a_lease_is_renewed() -> None:
    from embeddings.store.lease import leased

    lock = Renewals()
    with leased(lock, "one", 3.0, "here"):
        assert lock.renewed.wait(300)


def test_a_lease_that_ended_is_not_renewed() -> None:
    """A writer that was stopped for longer than its lock lasts: somebody else may have it."""
    from embeddings.store.lease import leased

    lock = Renewals()
    with leased(lock, "one", 0.3, "here") as lease:
        lease.renewed_at -= 1.0
        assert not lock.renewed.wait(0.5)
        with pytest.raises(StoreBusy, match="away for longer"):
            lease.check()


def test_a_lease_ends_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended, the monotonic clock stands still, and the server's goes on."""
    from embeddings.store.lease import leased

    slept_seconds = 0.0
    ask = time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: ask(clock) + (slept_seconds if clock == time.CLOCK_BOOTTIME else 0.0)
    )
    with leased(Renewals(), "one", 600.0, "here") as lease:
        lease.check()
        slept_seconds = 601.0
        with pytest.raises(StoreBusy, match="away for longer"):
            lease.check()
