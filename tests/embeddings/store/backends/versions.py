"""Versions of a collection that say by their values which they are: to write, and to tell from each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from embeddings.store import Collection
from embeddings.vectors.item_vectors import FOUND, ItemVectors

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


def num_rows(server: Any) -> int:
    with server.client() as client:
        return len(list(client.scan_iter(match="evenkeel:.*", count=10_000)))
