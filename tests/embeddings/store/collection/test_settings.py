"""Settings that name items lose those that were erased, by whichever process they are saved, and when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import ItemVectors

PROBE = {"ids": [1, 2, 3], "codes": [0, 1, 0], "held_out": [0, 0, 1], "weights": [0.5]}


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    collection = open_store(tmp_path).collection("items")
    collection.publish(collection.write(ItemVectors(np.arange(9), np.ones((9, 4)))), None)
    return collection


def test_what_was_saved_before_an_erasure(collection: Collection) -> None:
    collection.save_settings("canary", "genre", PROBE)
    collection.erase([2], "asked for")
    assert collection.settings("canary") == {
        "genre": {"ids": [1, 3], "codes": [0, 0], "held_out": [0, 1], "weights": [0.5]}
    }


def test_what_is_saved_after_an_erasure(collection: Collection) -> None:
    collection.erase([1, 3], "asked for")
    collection.save_settings("canary", "genre", PROBE)
    assert collection.settings("canary")["genre"]["ids"] == [2]


def test_settings_that_name_no_items_are_left_alone(collection: Collection) -> None:
    for kind, document in (("canary", {"ids": []}), ("canary", {"other": 1}), ("other", PROBE)):
        collection.save_settings(kind, "one", document)
        collection.erase([2], "asked for")
        assert collection.settings(kind) == {"one": document}
