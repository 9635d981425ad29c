"""What calibrations of earlier versions left in a store: limits, which are not read, and scratch collections, from
which ids are erased too and to which nothing is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.refresh import scratch
from embeddings.refresh.publish import Gate, RefreshRequest, Settings, publish_candidate
from embeddings.store import Store, open_store
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors

N, ID = 300, 17


SETTINGS = Settings(gate=Gate("off"), ema=None)


def scratch_name(collection: str) -> str:
    """A name as earlier versions gave it, which fits the limit of names."""
    return f"{collection[:48]}-nulls-0123abcd"


def candidate(seed: int, ids: Any = None) -> ItemVectors:
    vectors = np.random.default_rng(seed).standard_normal((N, 8)).astype(np.float32)
    return ItemVectors(np.arange(N) if ids is None else ids, vectors)


def publish(store: Store, name: str, seed: int) -> None:
    parent = store.collection(name).current()
    assert (
        publish_candidate(store, name, RefreshRequest(candidate(seed), SETTINGS, parent_version=parent)).version
        is not None
    )


def leave_scratch(store: Store, name: str, *seeds: int, ids: Any = None) -> None:
    """Publish as earlier versions did."""
    collection = store.collection(name)
    for seed in seeds:
        parent = collection.current()
        collection.publish(collection.write(candidate(seed, ids), parent=parent), parent)


def statuses(store: Store, name: str) -> list[int]:
    """Of the id in each version."""
    collection = store.collection(name)
    return [int(collection.lookup([ID], one["version"])[1][0]) for one in collection.versions()]


@pytest.mark.parametrize("name", ["items", "i" * 63])
def test_an_erasure_reaches_the_scratch_collections(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    nulls, others = scratch_name(name), scratch_name("films")
    publish(store, name, 1)
    publish(store, name, 2)
    for collection in (nulls, others):
        leave_scratch(store, collection, 1, 2)
    canary = {"ids": [ID, 18], "codes": [0, 1], "held_out": [0, 1]}
    store.collection(nulls).save_settings("canary", "genre", canary)
    assert scratch.scratch_names(store, name) == [nulls]
    done = scratch.erase(store, name, [ID], "they asked", key="key_1")
    assert done == {"versions": ["v000001", "v000002"], "rows": 2}
    assert statuses(store, name) == statuses(store, nulls) == [MISSING] * 2
    assert statuses(store, others) == [FOUND] * 2
    assert store.collection(nulls).settings("canary")["genre"]["ids"] == [18]
    (note,) = store.collection(nulls).erasures()
    assert (note["reason"], note["key"]) == ("they asked", "key_1")


def test_nothing_is_published_to_one(tmp_path: Path) -> None:
    """A job of an earlier version that waited in a queue may have rows of ids that were erased since."""
    store = open_store(tmp_path)
    end = publish_candidate(store, scratch_name("items"), RefreshRequest(candidate(2), SETTINGS, parent_version=None))
    assert (end.status, end.version) == ("held", None)
    assert "publish to a collection of another name" in end.reasons[0]
    assert store.collections() == []


def test_a_scratch_collection_of_other_ids_is_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, "items", 1)
    nulls = scratch_name("items")
    leave_scratch(store, nulls, 2, ids=[f"item {number}" for number in range(N)])
    assert scratch.erase(store, "items", [ID], "they asked")["rows"] == 1
    assert store.collection(nulls).erasures() == []


def test_limits_that_an_earlier_version_kept_are_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, "items", 1)
    kept = {"model": "", "dim": 8, "num_nulls": 3, "limits": {"cosine_mean": 2.0}, "nulls": {}, "kind": "halves"}
    store.collection("items").save_settings("calibration", "default", kept)
    end = publish_candidate(store, "items", RefreshRequest(candidate(1), Settings(ema=None), parent_version="v000001"))
    assert end.status == "published", end.reasons
    assert {check["metric"]: check["threshold"] for check in end.gate}["cosine_mean"] == 0.75
