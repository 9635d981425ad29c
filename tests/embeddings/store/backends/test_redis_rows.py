"""A version in Redis: its rows, those of earlier releases with a key each, and how long they stay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embeddings.store import Store, StoreUnavailable, UnknownVersion, open_store
from embeddings.store.backends import redis, redis_rows
from embeddings.store.collection import erasure
from embeddings.store.nearest_neighbors import NeighborSearch
from embeddings.store.version import key_column, keys_of_column
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors
from tests.embeddings.store.backends.versions import NUM_ITEMS, assert_serves, num_rows, publish

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


def loads(server: Any) -> set[str]:
    """BASE of all rows."""
    with server.client() as client:
        return {key.decode().removesuffix(":info") for key in client.keys("*:info")}


def turn_into_keys(server: Any, base: str = "", on: str | None = None) -> str:
    """Write rows as earlier releases wrote them, a key for each; return their BASE, by default the only one.

    ``on``: BASE of such rows, of which those that are alike are left out.
    """
    if not base:
        (base,) = loads(server)
    with server.client() as client:
        info = json.loads(client.get(f"{base}:info"))
        values = {} if on is None else keyed_rows(client, on)
        chunks = [pa.ipc.open_stream(client.get(f"{base}:chunk:{n}")).read_all() for n in range(info["chunks"])]
        table = pa.concat_tables(chunks).combine_chunks()
        column = table["key"].chunk(0)
        ids = [str(one).encode() if isinstance(one, int) else one for one in keys_of_column(column).tolist()]
        blocks = [f"{base}:block:{number}" for number in range(info["blocks"])]
        raw = b"".join(client.mget(blocks))
        width = len(raw) // len(ids)
        statuses = table["status"].to_pylist()
        own = {
            one: raw[number * width : (number + 1) * width] + bytes([statuses[number]])
            for number, one in enumerate(ids)
        }
        row = f"evenkeel:.{base.rpartition('.')[2]}:".encode()
        gone = sorted(values.keys() - own.keys())
        changed = {one: value for one, value in own.items() if values.get(one) != value}
        client.mset({row + one: value for one, value in {**changed, **dict.fromkeys(gone, b"\0")}.items()})
        if on is not None:
            batch = pa.record_batch({"key": key_column(np.array([int(one) for one in gone], dtype=np.int64))})
            client.set(f"{base}:gone", redis_rows.columns_stream(batch))
        name = None if on is None else on.rpartition(":")[2]
        del info["block_rows"]
        client.set(f"{base}:info", json.dumps(info | {"base": name, "row_keys": row.decode(), "blocks": 0}))
        client.delete(*blocks)
    return base


def keyed_rows(client: Any, base: str) -> dict[bytes, bytes]:
    row = json.loads(client.get(f"{base}:info"))["row_keys"].encode()
    keys = client.keys(row + b"*")
    return {key[len(row) :]: value for key, value in zip(keys, client.mget(keys), strict=True)}


def scripts(rows: int, times: int = 1) -> dict[str, int]:
    """Commands of lookups: one script, which asks for ``alive`` and the revision beside the rows."""
    found = {"evalsha": times, "exists": times, "get": times, "getrange": rows}
    return {name: calls for name, calls in found.items() if calls}


def test_a_lookup_is_one_round_trip(opened: Callable[..., Store], redis_server: Any) -> None:
    ours, other = opened("grace_seconds=0").collection("items"), opened().collection("items")
    publish(ours, 1)
    other.lookup([1])
    assert commands(redis_server, lambda: other.lookup(np.arange(2000))) == scripts(2000)
    publish(ours, 2)
    # Asked in vain once, then as when it is seen for the first time, then in one again.
    assert (other.lookup(np.arange(NUM_ITEMS))[2] == 2).all()
    assert commands(redis_server, lambda: other.lookup([1])) == scripts(1)
    # The first GET asks for a switch.
    assert commands(redis_server, lambda: other.open().lookup([1])) == scripts(1) | {"get": 2}

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


def test_rows_in_blocks(opened: Callable[..., Store], redis_server: Any) -> None:
    """One round trip of ranges; a version that goes takes its blocks along."""
    packed, other = opened("grace_seconds=0").collection("items"), opened("rows=packed").collection("items")
    vectors = np.random.default_rng(0).standard_normal((NUM_ITEMS, 400)).astype(np.float16).astype(np.float32)
    publish(packed, 1, vectors)
    with redis_server.client() as client:
        assert len(client.keys("*:block:*")) == 2
    rows = np.random.default_rng(1).permutation(2 * NUM_ITEMS)
    for reader in (packed, other):
        version, status, found = reader.lookup(rows)
        assert version == "v000001"
        np.testing.assert_array_equal(status == FOUND, rows < NUM_ITEMS)
        np.testing.assert_array_equal(found[rows < NUM_ITEMS], vectors[rows[rows < NUM_ITEMS]])
        assert not found[rows >= NUM_ITEMS].any()
        np.testing.assert_array_equal(reader.open().vectors, vectors)
    # Blocks are as long as their writer says, whatever this release would make.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_rows, "BLOCK_BYTES", 4000)
        np.testing.assert_array_equal(opened().collection("items").lookup([NUM_ITEMS - 1])[2], vectors[[-1]])
    # One script for each part of 2048.
    assert commands(redis_server, lambda: packed.lookup(rows)) == scripts(NUM_ITEMS, times=2)
    assert commands(redis_server, lambda: packed.lookup([-1])) == scripts(0)
    publish(packed, 2, vectors + 1)
    packed.retain(1)
    wait_for_none(redis_server, "evenkeel:items:*:block:*", but=2)
    # What it has open went with the switch, which it has not seen yet.
    np.testing.assert_array_equal(other.lookup([5])[2], (vectors[[5]] + 1).astype(np.float16))


def test_rows_in_blocks_that_are_gone(opened: Callable[..., Store], redis_server: Any) -> None:
    """A block or ``alive`` is lost, or a block is another: an error, and never zeros or a wait without an end."""
    collection = opened().collection("items")
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


def test_a_server_that_does_not_answer(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "_SOCKET_SECONDS", 0.1)
    collection = opened().collection("items")
    publish(collection, 1)
    reader = opened().collection("items").open()
    assert reader.lookup([1])[1][0, 0] == 1
    with redis_server.client() as client:
        client.client_pause(4_000)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            reader.lookup([1])
        client.ping()
    assert reader.lookup([1])[1][0, 0] == 1


@pytest.mark.parametrize("ids", [np.arange(NUM_ITEMS), [f"é{number:05}" for number in range(NUM_ITEMS)]])
def test_rows_with_a_key_each_are_rewritten_served_and_removed(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch, ids: Any
) -> None:
    monkeypatch.setattr(redis_rows, "CHUNK_ROWS", 512)
    monkeypatch.setattr(redis_rows, "KEYED_ROWS_SECONDS", 2)
    collection = opened("grace_seconds=0").collection("items")
    vectors = np.random.default_rng(0).standard_normal((NUM_ITEMS, 8)).astype(np.float16).astype(np.float32)
    publish(collection, 1, vectors, ids)
    turn_into_keys(redis_server)
    reader, asked = opened().collection("items").open(), list(ids[::-1]) + ([-5] if ids[0] == 0 else ["nobody"])
    with redis_server.client() as client:
        (info,) = [json.loads(client.get(name)) for name in client.keys("*:info")]
        # Readers of the release before still find theirs.
        assert info["blocks"] == 1
        assert len(client.keys("evenkeel:.*")) == NUM_ITEMS
    status, found = reader.lookup(asked)
    assert status.tolist() == [FOUND] * NUM_ITEMS + [MISSING]
    np.testing.assert_array_equal(found[:-1], vectors[::-1])
    np.testing.assert_array_equal(np.asarray(reader.items().vectors), vectors)
    wait_for_none(redis_server, "evenkeel:.*")
    np.testing.assert_array_equal(opened().collection("items").lookup(asked[:-1])[2], vectors[::-1])
    publish(collection, 2, ids=ids)
    assert collection.retain(1) == ["v000001"]
    with pytest.raises(UnknownVersion, match="gone"):
        reader.lookup(asked)
    assert (opened().collection("items").lookup(asked[:-1])[2] == 2).all()


def test_keyed_rows_that_are_gone_are_not_rewritten(opened: Callable[..., Store], redis_server: Any) -> None:
    publish(opened().collection("items"), 1)
    base = turn_into_keys(redis_server)
    with redis_server.client() as client:
        lost = client.keys("evenkeel:.*")[7]
        kept = client.get(lost)
        client.delete(lost)
        with pytest.raises(UnknownVersion, match="gone"):
            opened().collection("items").open()
        client.set(lost, kept)
        client.delete(f"{base}:alive")
        with pytest.raises(UnknownVersion, match="gone"):
            opened().collection("items").open()
        assert client.keys("*:block:*") == []


def test_rows_that_an_older_release_named_by_their_version_are_served(
    opened: Callable[..., Store], redis_server: Any
) -> None:
    collection = opened("grace_seconds=0").collection("items")
    publish(collection, 1)
    base = turn_into_keys(redis_server)
    with redis_server.client() as client:
        info = json.loads(client.get(f"{base}:info"))
        rows = info.pop("row_keys").encode()
        for key in client.keys(rows + b"*"):
            client.rename(key, f"{base}:id:".encode() + key[len(rows) :])
        client.set(f"{base}:info", json.dumps(info))
    assert_serves(opened().collection("items"), 1)
    publish(collection, 2)
    collection.retain(1)
    assert_serves(opened().collection("items"), 2)


def test_a_version_that_rests_on_anothers_rows(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are rewritten, in whatever order they are asked for; then its base goes alone, and an erasure reaches it."""
    monkeypatch.setattr(redis_rows, "KEYED_ROWS_SECONDS", 1)
    collection = opened("grace_seconds=0").collection("items")
    ids = np.arange(0, 2 * NUM_ITEMS, 2)
    first = np.random.default_rng(0).standard_normal((NUM_ITEMS, 8)).astype(np.float16).astype(np.float32)
    second, second_ids = first.copy(), ids.copy()
    second[5], second_ids[7] = 9.0, 15
    publish(collection, 1, first, ids)
    (base,) = loads(redis_server)
    publish(collection, 2, second, second_ids)
    (other,) = loads(redis_server) - {base}
    turn_into_keys(redis_server, base)
    turn_into_keys(redis_server, other, on=base)
    collection = opened("grace_seconds=0").collection("items")  # which has not seen them otherwise
    assert num_rows(redis_server) == NUM_ITEMS + 3  # one changed, one new, a tombstone

    def assert_version(version: str, its_ids: np.ndarray, its_vectors: np.ndarray) -> None:
        reader = opened().collection("items").open(version)
        asked = np.arange(2 * NUM_ITEMS)
        status, vectors = reader.lookup(asked)
        np.testing.assert_array_equal(asked[status == FOUND], its_ids)
        np.testing.assert_array_equal(vectors[status == FOUND], its_vectors)
        np.testing.assert_array_equal(reader.keys, its_ids)
        np.testing.assert_array_equal(np.asarray(reader.items().vectors), its_vectors)

    assert_version("v000001", ids, first)
    assert_version("v000002", second_ids, second)
    wait_for_none(redis_server, "evenkeel:.*")
    assert collection.retain(1) == ["v000001"]
    assert_version("v000002", second_ids, second)
    erased = first[3].astype(np.float16).tobytes()
    assert held_in(redis_server, erased)
    assert collection.erase([int(ids[3])], "asked for") == {"versions": ["v000002"], "rows": 1}
    assert not held_in(redis_server, erased)
    left = np.delete(np.arange(NUM_ITEMS), 3)
    assert_version("v000002", second_ids[left], second[left])


def test_erased_rows_leave_a_version_that_was_published_meanwhile(
    opened: Callable[..., Store], redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third version is committed when the first has been rewritten and the second, its parent, has not."""
    eraser, publisher = (opened("grace_seconds=0").collection("items") for _ in range(2))
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
                patch.setattr(erasure.CollectionErasure, "finish_erasure", lambda self: None)
                publish(publisher, 3, third[ids], ids)
        return write_items(*arguments)

    monkeypatch.setattr(erasure, "write_items", publish_first)
    assert eraser.erase([3], "asked for") == {"versions": ["v000001", "v000002"], "rows": 2}
    assert not held_in(redis_server, erased)
    for version, vectors in (("v000001", first), ("v000002", second), ("v000003", third)):
        reader = opened().collection("items").open(version)
        np.testing.assert_array_equal(reader.keys, ids)
        np.testing.assert_array_equal(reader.lookup(ids)[1], vectors[ids])


def test_a_version_may_lose_all_its_rows(opened: Callable[..., Store]) -> None:
    collection = opened().collection("items")
    publish(collection, 1)
    collection.erase(np.arange(NUM_ITEMS), "everybody asked")
    assert (collection.open().lookup([1, 2])[0] == MISSING).all()
    reader = collection.open()
    assert not len(NeighborSearch(reader.vectors, reader.statuses).search(np.ones(8, np.float32), 10)[0])
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
