"""Collections of Milvus: their names, a loader that others took for dead, readers that iterate, and local files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.sinks import milvus
from embeddings.sinks.base import Batch, Content, SinkBusy, SinkError
from embeddings.sinks.registry import open_sink
from tests.support import sinks
from tests.support.sinks import OfMilvus


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OfMilvus]:
    with sinks.readable("milvus", tmp_path) as sink:
        assert isinstance(sink, OfMilvus)
        yield sink


def content(number: int, table: str = "items", before: Callable[[], None] = lambda: None) -> Content:
    def batches() -> Iterator[Batch]:
        before()
        yield Batch(np.arange(3), np.ones(3, np.uint8), np.full(3, number, np.float32), np.eye(3, dtype=np.float32))

    return Content(table, f"v{number:06d}", f"{number:016x}", "int64", 3, 3, batches)


def norms(rows: Any) -> set[float]:
    return {row[1] for row in rows.values()}


def test_the_collection_before_stays_until_the_next_load_or_a_purge(server: OfMilvus) -> None:
    sink = open_sink(server.url)
    with server.client() as client:
        for number in range(1, 4):
            sink.load(content(number))
            assert norms(server.rows("items")) == {number}
            assert len(client.list_collections()) == min(number, 2)
        sink.purge("items")
        assert client.list_collections() == [client.describe_alias("items")["collection_name"]]


def test_a_loader_that_others_took_for_dead_shows_readers_nothing(
    server: OfMilvus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_sink(server.url), open_sink(server.url)
    monkeypatch.setattr(milvus, "LEASE_SECONDS", 1000.0)

    def overtake() -> None:
        with pytest.raises(SinkBusy):
            second.load(content(2))
        with pytest.raises(SinkBusy):
            second.purge("items")
        monkeypatch.setattr(milvus, "LEASE_SECONDS", 0.0)
        second.load(content(2))

    with pytest.raises(Exception, match="does not exist"):
        first.load(content(1, before=overtake))
    assert norms(server.rows("items")) == {2}
    with server.client() as client:
        assert len(client.list_collections()) == 1


def test_a_slow_loader_that_renews_its_lock_is_left_alone_however_late_others_look(
    server: OfMilvus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_sink(server.url), open_sink(server.url)
    monkeypatch.setattr(milvus, "LEASE_SECONDS", 0.25)

    def look_twice() -> None:
        def beat() -> str:
            (name,) = client.list_collections()
            return str(client.describe_collection(name)["properties"])

        with server.client() as client:
            before = beat()
            with pytest.raises(SinkBusy):
                second.load(content(2))
            while beat() == before:
                pass
        # The other process looks so late that its lease would be over.
        monkeypatch.setattr(milvus, "LEASE_SECONDS", 0.0)
        with pytest.raises(SinkBusy):
            second.load(content(2))
        monkeypatch.setattr(milvus, "LEASE_SECONDS", 0.25)

    first.load(content(1, before=look_twice))
    assert norms(server.rows("items")) == {1}


def test_names_that_milvus_does_not_take_are_changed_and_two_tables_never_share_one(server: OfMilvus) -> None:
    sink = open_sink(server.url)
    sink.load(content(1, "2-items"))
    assert norms(server.rows("_2_items")) == {1}
    assert sink.holds("2-items") == f"{1:016x}"
    with pytest.raises(SinkError, match="'_2_items' there is not Evenkeel's"):
        sink.load(content(2, "2_items"))
    sink.drop("2_items")
    assert norms(server.rows("_2_items")) == {1}
    # Its collections' names begin with that of another table's collections.
    near = milvus._names("2-items")[2].strip("_")
    sink.load(content(3, near))
    sink.purge("2-items")
    assert norms(server.rows(f"_{near}")) == {3}


@pytest.mark.parametrize(("option", "kind"), [("", "FLAT"), ("?index=hnsw", "HNSW")])
def test_rows_are_found_by_cosine(server: OfMilvus, option: str, kind: str) -> None:
    open_sink(server.url + option).load(content(1))
    with server.client() as client:
        (found,) = client.search("items", [[0.1, 0.9, 0.0]], limit=1)
        index = client.describe_index("items", "vector")
    assert found[0]["id"] == 1
    assert (index["index_type"], index["metric_type"]) == (kind, "COSINE")


@pytest.mark.process
def test_a_file_is_closed_after_each_load_and_busy_while_another_process_has_it_open(tmp_path: Path) -> None:
    pytest.importorskip("pymilvus", reason="pymilvus is not installed")
    pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
    file = tmp_path / "new folder" / "vectors.db"
    sink = open_sink(f"milvus://{file.as_posix().replace(' ', '%20')}")
    sink.load(content(1))
    program = f"""
from pymilvus import MilvusClient
client = MilvusClient({str(file)!r})
client.load_collection("items")
print(sorted(row["norm"] for row in client.query("items", filter="", limit=9)), flush=True)
input()
"""
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"[1.0, 1.0, 1.0]\n"
        with pytest.raises(SinkBusy, match="another process may have it open"):
            sink.load(content(2))
    finally:
        reader.communicate(b"\n")
    sink.load(content(2))
    assert sink.holds("items") == f"{2:016x}"


@pytest.mark.parametrize(
    "url", ["milvus:///", "milvus:///folder", "milvus://host?index=ivf", "milvus://host?secure=no", "milvus://host?a=b"]
)
def test_an_address_that_says_nothing_is_refused(url: str) -> None:
    pytest.importorskip("pymilvus", reason="pymilvus is not installed")
    pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
    with pytest.raises(SinkError, match="a URL of Milvus"):
        open_sink(url)
