"""A store that goes back to an earlier state under a process that reads it: names of versions come again, with other
vectors, and what the process has open of a name is not what the name means now."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import CorruptStore, Store, open_store
from embeddings.vectors.item_vectors import ItemVectors
from tests.contracts import store_servers

IDS = np.arange(50)


def vectors_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((len(IDS), 8)).astype(np.float32)


def publish(store: Store, seed: int) -> str:
    collection = store.collection("items")
    parent = collection.current()
    version = collection.write(ItemVectors(IDS, vectors_of(seed)), parent=parent)
    collection.publish(version, parent)
    return version


class Restorable:
    """A store with a state that it can be brought back to."""

    def __init__(self, open_: Callable[[], Store], keep: Callable[[], None], restore: Callable[[], None]):
        self.open, self.keep, self.restore = open_, keep, restore


@pytest.fixture(params=["directory", pytest.param("redis", marks=pytest.mark.process)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restorable]:
    if request.param == "directory":
        root, backup = tmp_path / "store", tmp_path / "backup"
        root.mkdir()

        def restore() -> None:
            shutil.rmtree(root)
            shutil.copytree(backup, root)

        yield Restorable(lambda: open_store(root), lambda: shutil.copytree(root, backup) and None, restore)
        return
    numbers = iter(range(1000))
    kept: dict[bytes, bytes] = {}
    with store_servers.redis_server(tmp_path) as server, server.client() as client:

        def put_back() -> None:
            client.flushall()
            for key, value in kept.items():
                client.restore(key, 0, value)

        yield Restorable(
            lambda: open_store(f"{server.url}?cache={tmp_path}/{next(numbers)}&grace_seconds=0"),
            lambda: kept.update({key: client.dump(key) for key in client.scan_iter()}),
            put_back,
        )


def assert_serves(store: Store, version: str, seed: int) -> None:
    collection = store.collection("items")
    name, _, vectors = collection.lookup(IDS)
    assert name == version
    expected = vectors_of(seed)
    np.testing.assert_allclose(vectors, expected, atol=1e-3)
    phi = collection.view_lookup("items_rff", IDS)[1]
    np.testing.assert_allclose(phi, collection.view_transform("items_rff", vectors), atol=1e-3)
    np.testing.assert_allclose(collection.open(version).lookup(IDS)[1], expected, atol=1e-3)
    assert collection.manifest(version)["created_at"] == collection.open().manifest.created_at


def test_a_name_that_comes_again_is_another_version(place: Restorable) -> None:
    writer, reading = place.open(), place.open()
    publish(writer, 1)
    writer.collection("items").create_view("items_rff", kind="rff", dim=32, materialized=True)
    place.keep()
    for seed in (2, 3):
        publish(writer, seed)
    assert_serves(reading, "v000003", 3)
    assert_serves(reading, "v000003", 3)
    reading.collection("items").open("v000002").lookup(IDS)

    place.restore()
    assert_serves(reading, "v000001", 1)
    another = place.open()
    for seed in (12, 13):
        publish(another, seed)
    assert_serves(reading, "v000003", 13)
    np.testing.assert_allclose(reading.collection("items").lookup(IDS, "v000002")[2], vectors_of(12), atol=1e-3)
    assert reading.damaged() == {}


def test_an_empty_store_takes_what_rests_on_a_version_that_it_lost(place: Restorable) -> None:
    place.keep()
    writer, reading = place.open(), place.open()
    first = publish(writer, 1)
    assert_version(reading, first, 1)
    place.restore()
    collection = place.open().collection("items")
    version = collection.write(ItemVectors(IDS, vectors_of(5)), parent=first)
    collection.publish(version, first)
    assert_version(reading, version, 5)


def assert_version(store: Store, version: str, seed: int) -> None:
    name, _, vectors = store.collection("items").lookup(IDS)
    assert name == version
    np.testing.assert_allclose(vectors, vectors_of(seed), atol=1e-3)


@pytest.mark.process
def test_rows_that_redis_lost_are_damage_and_the_version_before_is_served(tmp_path: Path) -> None:
    with store_servers.redis_server(tmp_path) as server, server.client() as client:
        reading, writer = (open_store(f"{server.url}?cache={tmp_path / name}") for name in ("reading", "writer"))
        publish(writer, 1)
        before = set(client.keys("*:block:*"))
        publish(writer, 2)
        assert_version(reading, "v000002", 2)
        (lost,) = set(client.keys("*:block:*")) - before
        base = lost.decode().rpartition(":block:")[0]
        client.delete(*client.keys(f"{base}:*"))

        assert_version(reading, "v000001", 1)
        assert list(reading.damaged()["items"]) == ["v000002"]
        with pytest.raises(CorruptStore, match="gone"):
            reading.collection("items").lookup(IDS, "v000002")
        publish(writer, 3)
        assert_version(reading, "v000003", 3)
