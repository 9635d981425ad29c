"""Real versions in a real store, for tests of what serves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embeddings.store import Collection, Store, default_view, open_store
from embeddings.store.generation_maps import GenerationMap
from embeddings.vectors.item_vectors import CARRIED, FOUND, ItemVectors
from embeddings.vectors.query_tower import QueryTower
from embeddings.vectors.user_vectors import SeenLists, UserVectors
from service.core.settings import Settings
from tests.support.query_towers import tower_of

DIM = 8
COMPARISON = {
    "version": "v000001",
    "differences": [
        {
            "metric": "auc", "slice": name, "rows": rows, "served": 0.7877, "candidate": candidate, "low": -0.0411,
            "high": -0.0309, "popularity": None,
        }
        for name, rows, candidate in (("all", 20_000, 0.7517), ("country=de", 5_000, 0.6517))
    ],
    "skipped": "",
}  # fmt: skip
"""How a model does beside the one that is served: worse, most of all in one country."""
QUALITY = {
    "metric": "auc", "validation": 0.7312, "test": None, "epoch": 10, "epochs": 10, "best_epoch": 3,
    "overfits": "validation auc was best in epoch 3, with 0.7530, and is 0.7312 in epoch 10, which is published: no",
    "before": {"version": "v000001", "metric": "auc", "validation": 0.7401, "test": None},
}  # fmt: skip
"""The held-out metric of a model that overfits, beside that of the version before."""


def store_at(settings: Settings) -> Store:
    return open_store(Path(settings.store_url))


def directions(num_items: int, seed: int, dim: int = DIM) -> np.ndarray:
    """Unit rows, float32 [num_items, dim]."""
    rows = np.random.default_rng(seed).standard_normal((num_items, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def write(
    collection: Collection,
    ids: Any,
    vectors: np.ndarray,
    *,
    carried: tuple[int, ...] = (),
    gate: Any = (),
    **fields: Any,
) -> str:
    """A candidate; ``carried`` are positions."""
    statuses = np.full(len(vectors), FOUND, dtype=np.uint8)
    statuses[list(carried)] = CARRIED
    return collection.write(ItemVectors(ids, vectors, statuses=statuses), gate=gate, **fields)


def publish(
    settings: Settings, name: str = "items", *, ids: Any = None, seed: int = 0, num_items: int = 50, **fields: Any
) -> tuple[str, np.ndarray]:
    """A published version with the default view, and its vectors. Ids are 10, 20, 30, ... unless given."""
    collection = store_at(settings).collection(name)
    ids = np.arange(1, num_items + 1) * 10 if ids is None else ids
    vectors = directions(len(ids), seed)
    if not collection.exists():
        collection.create_view(default_view(name), dim_in=DIM, anchor_generation=1)
    parent = collection.current()
    version = write(collection, ids, vectors, parent=parent, **fields)
    collection.publish(version, parent)
    return version, vectors


def change_model(
    settings: Settings, name: str = "items", *, dim: int = 12, held: tuple[str, ...] = ()
) -> tuple[str, np.ndarray]:
    """A published version of wider vectors, the first of generation 3: a map leads back to 1, one to 2 may be held."""
    collection = store_at(settings).collection(name)
    before = collection.open()
    wider = np.random.default_rng(1000).standard_normal((before.dim, dim))
    vectors = (before.vectors @ wider).astype(np.float32)
    matrix = np.vstack([np.linalg.pinv(wider), np.zeros(before.dim)])
    maps = [GenerationMap(1, matrix, {"kind": "ridge", "cosine": 1.0})]
    if held:
        maps.append(GenerationMap(2, matrix, {}, held))
    collection.create_view(default_view(name), dim_in=dim, anchor_generation=3)
    items = ItemVectors(before.keys, vectors)
    version = collection.write(items, parent=before.version, anchor_generation=3, maps=lambda written: maps)
    collection.publish(version, before.version)
    return version, vectors


def users_of(ids: Any, items: Any = (), seed: int = 0, tower: QueryTower | None = None) -> UserVectors:
    """Users with random vectors; the first has seen all ``items``, the others none."""
    vectors = np.random.default_rng(1000 + seed).standard_normal((len(ids), DIM)).astype(np.float32)
    starts = np.array([0, *[len(items)] * len(ids)])
    seen = SeenLists(np.asarray(items, np.int64), np.arange(len(items)), starts)
    return UserVectors(ids, vectors, seen, tower=tower)


def tower_of_items(seed: int = 0, num_items: int = 50) -> tuple[QueryTower, np.ndarray]:
    """A query tower of histories of the items that ``publish`` makes, and its row of each item."""
    rows = np.random.default_rng(2000 + seed).standard_normal((num_items, DIM)).astype(np.float32)
    return tower_of({"item": (list(range(10, 10 * num_items + 1, 10)), rows)}, history=True), rows


def hold(settings: Settings, name: str = "items", *, seed: int = 99, **fields: Any) -> str:
    """A version that the gate held; ``fields``: further ones of ``write``."""
    collection = store_at(settings).collection(name)
    ids = np.arange(1, 51) * 10
    gate = [{"metric": "mean_cosine", "value": 0.1, "threshold": 0.85, "verdict": "fail"}]
    version = write(collection, ids, directions(50, seed), parent=collection.current(), gate=gate, **fields)
    collection.hold(version, ["mean_cosine 0.10 is below 0.85"])
    return version
