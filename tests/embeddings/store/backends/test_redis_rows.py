"""A version in Redis: its rows, packed or not, what they share, and how long they stay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import Store, StoreUnavailable, UnknownVersion, open_store
from embeddings.store.backends import redis, redis_packed, redis_rows
from embeddings.store.collection import erasure
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors
from tests.embeddings.store.backends.versions import NUM_ITEMS, assert_serves, num_rows, publish, vectors_of

pytestmark = pytest.mark.process


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


def held_in(server: Any, vector: bytes) -> list[bytes]:
    """Keys of the values in Redis in which the bytes of a vector are."""
    with server.client() as client:
        keys = [key for key in client.scan_iter(count=10_000) if client.type(key) == b"string"]
        return [key for key in keys if vector in (client.get(key) or b"")]


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


@pytest.mark.parametrize("layout", ["keys", "packed"])
def test_erased_rows_leave_what_a_version_rests_on_that_was_published_meanwhile(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The third version is committed when the first has been rewritten and the second, its parent, has not."""
    eraser, publisher = (opened("grace_seconds=0", f"rows={layout}").collection("items") for _ in range(2))
    first = np.random.default_rng(0).standard_normal((NUM_ITEMS, 8)).astype(np.float16).astype(np.float32)
    second, third = first.copy(), first.copy()
    second[5], third[6] = 9.0, 9.0
    publish(eraser, 1, first)
    publish(eraser, 2, second)
    erased, ids = first[3].astype(np.float16).tobytes(), np.delete(np.arange(NUM_ITEMS), 3)
    assert held_in(redis_server, erased)
    write_items, written = erasure.write_items, []

    def publish_first(*arguments: Any) -> Any:
        written.append(arguments[0])
        if len(written) == 2:
            # It had begun before the erasure was recorded, else it would finish that first.
            with monkeypatch.context() as patch:
                patch.setattr(erasure.Erasure, "finish", lambda self: None)
                publish(publisher, 3, third[ids], ids)
        return write_items(*arguments)

    monkeypatch.setattr(erasure, "write_items", publish_first)
    assert eraser.erase([3], "asked for") == {"versions": ["v000001", "v000002"], "rows": 2}
    assert not held_in(redis_server, erased)
    for version, vectors in (("v000001", first), ("v000002", second), ("v000003", third)):
        reader = opened().collection("items").open(version)
        np.testing.assert_array_equal(reader.keys, ids)
        np.testing.assert_array_equal(reader.lookup(ids)[1], vectors[ids])


@pytest.mark.parametrize("layout", ["keys", "packed"])
def test_a_version_may_lose_all_its_rows(opened: Callable[..., Store], layout: str) -> None:
    store = opened(f"rows={layout}")
    collection = store.collection("items")
    publish(collection, 1)
    collection.erase(np.arange(NUM_ITEMS), "everybody asked")
    assert (collection.open().lookup([1, 2])[0] == MISSING).all()
    assert collection.open().neighbors(np.ones(8, np.float32)) == []
    assert len(collection.open().items()) == 0
    # Nothing stands in the way of what comes after.
    assert collection.erase([10**6], "one more")["rows"] == 0
    publish(collection, 2, ids=np.arange(NUM_ITEMS, 2 * NUM_ITEMS))
    assert (opened().collection("items").open().lookup([NUM_ITEMS])[0] == FOUND).all()


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


def test_processes_share_a_mirror_of_rows(redis_server: Any, tmp_path: Path) -> None:
    url = f"{redis_server.url}?cache={tmp_path / 'mirror'}"
    late = open_store(f"{url}&follow_seconds=600").collection("items")
    writer = open_store(url).collection("items")
    publish(writer, 1)
    assert_serves(late, 1)
    publish(writer, 2)
    assert_serves(late, 2)
    assert late.damaged() == {}
