"""Refreshes of one geometry in bases of their own, and the publishing of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.store import Collection, Store
from embeddings.vectors.item_vectors import ItemVectors, unit_rows

N, D = 400, 8


def geometry(seed: int = 0, num_items: int = N, dim: int = D) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_items, dim))


def basis(seed: int, dim: int = D) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]


def retrained(seed: int, noise: float = 0.15, base: np.ndarray | None = None) -> np.ndarray:
    """A refresh: the same geometry, a little noise, rows of other lengths, a basis of its own."""
    base = geometry() if base is None else base
    rng = np.random.default_rng(1000 + seed)
    moved = base + noise * rng.standard_normal(base.shape)
    return (moved * rng.uniform(0.2, 5, (len(base), 1)) @ basis(seed, base.shape[1])).astype(np.float32)


def publish(
    store: Store, vectors: np.ndarray, settings: Any = None, ids: Any = None, *, parent: Any = "current", **options: Any
) -> Publication:
    columns = {name: options.pop(name) for name in ("evidence", "counts", "norms") if name in options}
    candidate = ItemVectors(np.arange(len(vectors)) if ids is None else ids, vectors, **columns)
    parent = store.collection("items").current() if parent == "current" else parent
    return publish_candidate(
        store, "items", RefreshRequest(candidate, settings or Settings(), parent_version=parent, **options)
    )


def served(collection: Collection, ids: Any = None) -> np.ndarray:
    vectors: np.ndarray = collection.open().lookup(np.arange(N) if ids is None else ids)[1]
    return vectors


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.asarray(np.sum(unit_rows(left)[0] * unit_rows(right)[0], axis=1))


def shuffled_ids(raw: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).permutation(raw)
