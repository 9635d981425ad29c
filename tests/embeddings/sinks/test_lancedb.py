"""A directory of LanceDB: readers that keep a table open, and the versions that are kept for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from embeddings.sinks.base import Batch, Content, SinkError
from embeddings.sinks.registry import open_sink
from tests.support import sinks
from tests.support.sinks import OfLanceDB


@pytest.fixture
def lance(tmp_path: Path) -> Iterator[OfLanceDB]:
    with sinks.readable("lancedb", tmp_path) as sink:
        assert isinstance(sink, OfLanceDB)
        yield sink


def content(number: int) -> Content:
    batch = Batch(np.arange(3), np.ones(3, np.uint8), np.full(3, number, np.float32), np.eye(3, dtype=np.float32))
    return Content("items", f"v{number:06d}", str(number), "int64", 3, 3, lambda: iter([batch]))


def test_a_table_that_is_open_keeps_its_version_through_one_load(lance: OfLanceDB) -> None:
    import lancedb

    sink = open_sink(lance.url)
    sink.load(content(1))
    table = lancedb.connect(lance.directory).open_table("items")
    sink.load(content(2))
    assert table.to_arrow()["norm"].to_pylist() == [1, 1, 1]
    for number in range(3, 8):
        sink.load(content(number))
        table = lancedb.connect(lance.directory).open_table("items")
        assert table.to_arrow()["norm"].to_pylist() == [number] * 3
        assert len(table.list_versions()) == 2
    sink.purge("items")
    assert len(table.list_versions()) == 1


@pytest.mark.parametrize("url", ["lancedb://host/path", "lancedb:///", "lancedb:///path?a=b"])
def test_an_address_that_is_no_directory_is_refused(url: str) -> None:
    pytest.importorskip("lancedb", reason="lancedb is not installed")
    with pytest.raises(SinkError, match="names a directory and nothing else"):
        open_sink(url)
