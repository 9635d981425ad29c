"""Scratch collections: their names, and what is erased from the collection that they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.refresh import scratch
from embeddings.refresh.publish import Gate, Settings, publish_candidate
from embeddings.store import NAME_PATTERN, Store, open_store
from embeddings.store.collection import erasure, writer
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors

N, ID = 300, 17


def publish(store: Store, name: str, seed: int, ids: Any = None) -> str:
    vectors = np.random.default_rng(seed).standard_normal((N, 8)).astype(np.float32)
    candidate = ItemVectors(np.arange(N) if ids is None else ids, vectors)
    settings = Settings(gate=Gate("off"), ema=None)
    end = publish_candidate(store, name, candidate, settings, parent_version=store.collection(name).current())
    assert end.version is not None
    return end.version


def statuses(store: Store, name: str) -> list[int]:
    """Of the id in each version."""
    collection = store.collection(name)
    return [int(collection.lookup([ID], one["version"])[1][0]) for one in collection.versions()]


@pytest.mark.parametrize("length", [1, 48, 49, 63])
def test_names_fit(length: int) -> None:
    collection = "x" * length
    name = scratch.scratch_name(collection)
    assert NAME_PATTERN.fullmatch(name)
    assert scratch.is_scratch(name)
    assert not scratch.is_scratch(collection)


@pytest.mark.parametrize("name", ["items", "i" * 63])
def test_an_erasure_reaches_the_scratch_collections(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    nulls, others = scratch.scratch_name(name), scratch.scratch_name("films")
    for collection in (name, nulls, others):
        publish(store, collection, 1)
        publish(store, collection, 2)
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


def test_nulls_leave_out_what_was_erased(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, "items", 1)
    store.collection("items").erase([ID], "they asked")
    nulls = scratch.scratch_name("items")
    for seed in (2, 3):
        publish(store, nulls, seed)
    assert statuses(store, nulls) == [MISSING] * 2
    store.collection("items").readmit([ID], "they came back")
    later = scratch.scratch_name("items")
    publish(store, later, 4)
    assert statuses(store, later) == [FOUND]


def test_an_erasure_while_the_first_null_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees the scratch collection yet, and its version is made of rows that have the id."""
    store = open_store(tmp_path)
    publish(store, "items", 1)
    write_items = writer.write_items

    def erase_first(*arguments: Any) -> Any:
        monkeypatch.setattr(writer, "write_items", write_items)
        scratch.erase(open_store(tmp_path), "items", [ID], "just now")
        return write_items(*arguments)

    monkeypatch.setattr(writer, "write_items", erase_first)
    nulls = scratch.scratch_name("items")
    publish(store, nulls, 2)
    assert statuses(store, nulls) == [MISSING]


def test_a_first_null_that_is_published_while_ids_are_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ready before the erasure was recorded, and the eraser had looked for scratch collections before."""
    store = open_store(tmp_path)
    publish(store, "items", 1)
    nulls = scratch.scratch_name("items")
    keys_of = erasure.keys_of

    def publish_first(ids: Any) -> Any:
        monkeypatch.setattr(erasure, "keys_of", keys_of)
        publish(open_store(tmp_path), nulls, 2)
        return keys_of(ids)

    monkeypatch.setattr(erasure, "keys_of", publish_first)
    scratch.erase(store, "items", [ID], "just now")
    assert statuses(store, nulls) == [MISSING]


def test_a_scratch_collection_of_other_ids_is_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, "items", 1)
    nulls = scratch.scratch_name("items")
    publish(store, nulls, 2, ids=[f"item {number}" for number in range(N)])
    assert scratch.erase(store, "items", [ID], "they asked")["rows"] == 1
    assert store.collection(nulls).erasures() == []
