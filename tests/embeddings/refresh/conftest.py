"""A store, and a collection in it, for refreshes."""

from __future__ import annotations

from pathlib import Path

import pytest

from embeddings.store import Collection, Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


@pytest.fixture
def collection(store: Store) -> Collection:
    return store.collection("items")
