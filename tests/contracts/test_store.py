"""What every feature store promises, one suite run over each implementation: embedded, Redis, object storage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.store import Store, open_store
from embeddings.store.backends import redis_rows
from embeddings.vectors.item_vectors import FOUND, MISSING
from tests.contracts import store_servers
from tests.contracts.store.base import Reopen, items, publish
from tests.contracts.store.contents import Contents
from tests.contracts.store.several_processes import SeveralProcesses
from tests.contracts.store.versions import Versions
from tests.contracts.store.views import Views


class StoreContract(Versions, Contents, Views, SeveralProcesses):
    """Inherited by each implementation, which provides ``store``."""


class TestEmbeddedStore(StoreContract):
    @pytest.fixture(params=["path", "url"])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
        root = tmp_path / "a store"
        return open_store(root if request.param == "path" else "file://" + str(root).replace(" ", "%20"))

    @given(stored=st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), data=st.data())
    def test_lookup_is_a_dictionary(
        self, tmp_path_factory: pytest.TempPathFactory, stored: set[int], data: st.DataObject
    ) -> None:
        collection = open_store(tmp_path_factory.mktemp("store")).collection("items")
        ids = list(stored)
        content = items(ids, dim=3)
        publish(collection, content)
        asked = data.draw(st.lists(st.sampled_from(ids) | st.integers(-(2**63), 2**63 - 1), max_size=20))
        status, vectors = collection.open().lookup(np.array(asked, dtype=np.int64))
        by_id = dict(zip(content.keys.tolist(), content.vectors, strict=True))
        assert status.tolist() == [FOUND if wanted in by_id else MISSING for wanted in asked]
        for wanted, vector in zip(asked, vectors, strict=True):
            np.testing.assert_array_equal(vector, by_id.get(wanted, np.zeros(3)))


class TestRedisStore(StoreContract):
    """Rows in blocks, two or three to a block."""

    @pytest.fixture
    def url(self, redis_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        monkeypatch.setattr(redis_rows, "BLOCK_BYTES", 48)
        with store_servers.redis_prefix(redis_url, request.node.name) as url:
            yield url

    @pytest.fixture
    def store(self, url: str, tmp_path: Path) -> Store:
        return open_store(f"{url}&cache={tmp_path / 'cache'}")

    @pytest.fixture
    def again(self, url: str, tmp_path: Path) -> Reopen:
        numbers = itertools.count()
        return lambda: open_store(f"{url}&cache={tmp_path / f'other{next(numbers)}'}")


class TestObjectStore(StoreContract):
    # Each takes some hundred requests.
    num_switches = 3

    @pytest.fixture
    def url(self, s3_address: str, tmp_path: Path) -> str:
        return f"s3://vectors/{tmp_path.name}?endpoint_override={s3_address}&scheme=http&follow_seconds=0"

    @pytest.fixture
    def store(self, url: str, tmp_path: Path) -> Store:
        return open_store(f"{url}&cache={tmp_path / 'cache'}")

    @pytest.fixture
    def again(self, url: str, tmp_path: Path) -> Reopen:
        numbers = itertools.count()
        return lambda: open_store(f"{url}&cache={tmp_path / f'other{next(numbers)}'}")


@pytest.mark.process
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "use a path"),
        ("file://elsewhere/x", "use a path"),
        ("redis://127.0.0.1/0?prefx=a", "no option prefx"),
        ("redis://127.0.0.1/0?follow_seconds=soon", "follow_seconds is 'soon'"),
        ("redis://127.0.0.1/0?lease_seconds=0", "lease_seconds is '0'"),
        ("redis://127.0.0.1/0?grace_seconds=x", "grace_seconds"),
        ("redis://127.0.0.1/0?rows=keys", "rows=keys was removed: .* leave rows out"),
        ("s3:///prefix", "s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/prefix", "credentials into the environment"),
    ],
)
def test_urls_that_cannot_be(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)
