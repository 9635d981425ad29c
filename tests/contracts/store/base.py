"""What the parts share: the fixtures that an implementation provides, and something to publish."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import ItemVectors

Reopen = Callable[[], Store]


def items(ids: object, fill: float = 1.0, dim: int = 4, **columns: object) -> ItemVectors:
    num_ids = len(ids)  # type: ignore[arg-type]
    vectors = np.random.default_rng(int(fill)).standard_normal((num_ids, dim)).astype(np.float32)
    vectors[:, 0] = fill
    return ItemVectors(ids, vectors, **columns)  # type: ignore[arg-type]


def publish(collection: Collection, content: ItemVectors, **fields: object) -> str:
    parent = collection.current()
    version = collection.write(content, parent=parent, **fields)  # type: ignore[arg-type]
    collection.publish(version, parent)
    return version


class Base:
    """Inherited by each part; an implementation provides ``store``: a fresh, empty one."""

    num_switches = 20

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def again(self, store: Store) -> Reopen:
        """Opens the same store as another process would, with nothing of what this one has at hand."""
        return lambda: open_store(store.root)

    @pytest.fixture
    def collection(self, store: Store) -> Collection:
        return store.collection("items")
