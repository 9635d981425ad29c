"""What every sink promises its readers: one whole version at all times, and no erased id in any table."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.sinks.base import Sink, SinkBusy, SinkError
from embeddings.sinks.follow import attach, lag_seconds, sinks_of, sync, sync_when_free
from embeddings.sinks.registry import open_sink
from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import CARRIED, FOUND, MISSING, ItemVectors
from tests.support import sinks
from tests.support.sinks import Readable

NAME = "warehouse"


@pytest.fixture(params=sinks.KINDS)
def readable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Readable]:
    with sinks.readable(request.param, tmp_path) as sink:
        yield sink


@pytest.fixture
def sink(readable: Readable) -> Sink:
    return open_sink(readable.url)


@pytest.fixture
def items(tmp_path: Path) -> Collection:
    return open_store(tmp_path / "store").collection("items")


def publish(collection: Collection, number: int, ids: Any = None, dim: int = 4, **columns: Any) -> str:
    """A version whose rows all have ``number`` as their norm."""
    ids = [f"item {row}" for row in range(50)] if ids is None else ids
    vectors = np.random.default_rng(number).standard_normal((len(ids), dim)).astype(np.float32)
    rows = ItemVectors(ids, vectors, norms=np.full(len(ids), number, np.float32), **columns)
    version = collection.write(rows, parent=collection.current())
    collection.publish(version, collection.current())
    attach(collection, [NAME])
    return version


def expected(collection: Collection) -> dict[Any, tuple[str, float, list[float], str]]:
    reader = collection.open()
    words = [("missing", "found", "carried", "uncertain")[status] for status in reader.statuses]
    rows = zip(words, reader.norms.tolist(), reader.vectors.tolist(), strict=True)
    return {
        id_: (*row, reader.version)
        for id_, row in zip(reader.ids.to_pylist(), rows, strict=True)
        if row[0] != "missing"
    }


@pytest.mark.parametrize("ids", [[7, -3, 2**62], ["a", "bc", "größer", "d" * 300]], ids=["integers", "texts"])
def test_a_version_is_loaded_as_it_is_and_once(sink: Sink, readable: Readable, items: Collection, ids: Any) -> None:
    statuses = np.array([FOUND, CARRIED, MISSING, FOUND], np.uint8)[: len(ids)]
    publish(items, 1, ids, statuses=statuses)
    assert sync(items, NAME, sink)
    assert readable.rows("items") == expected(items)
    assert len(expected(items)) == len(ids) - 1
    assert not sync(items, NAME, sink)
    (shown,) = sinks_of(items)
    assert (shown["version"], shown["rows"], shown["lag_seconds"], shown["error"]) == (
        "v000001",
        len(ids) - 1,
        0.0,
        None,
    )


def test_readers_follow_refreshes_another_dimension_and_a_rollback(
    sink: Sink, readable: Readable, items: Collection
) -> None:
    for number, dim in ((1, 4), (2, 4), (3, 6)):
        publish(items, number, dim=dim)
        assert sinks_of(items)[0]["lag_seconds"] > 0
        sync(items, NAME, sink)
        assert readable.rows("items") == expected(items)
    items.promote("v000002", "the last one is worse")
    sync(items, NAME, sink)
    assert readable.rows("items") == expected(items)
    assert {row[3] for row in expected(items).values()} == {"v000002"}


def test_an_erased_id_is_in_no_table_of_the_sink(sink: Sink, readable: Readable, items: Collection) -> None:
    for number in (1, 2):
        publish(items, number)
        sync(items, NAME, sink)
    assert readable.holds_text("item 17")
    items.erase(["item 17"], "asked for it")
    assert lag_seconds(items, items.settings("sink")[NAME]) > 0
    sync(items, NAME, sink)
    assert not readable.holds_text("item 17")
    assert readable.rows("items") == expected(items)
    assert "item 17" not in expected(items)
    assert sinks_of(items)[0]["lag_seconds"] == 0


def test_an_id_that_only_an_earlier_version_had_is_erased_too(
    sink: Sink, readable: Readable, items: Collection
) -> None:
    publish(items, 1, ["stays", "retired id"])
    sync(items, NAME, sink)
    publish(items, 2, ["stays"])
    sync(items, NAME, sink)
    items.erase(["retired id"], "asked for it")
    sync(items, NAME, sink)
    assert not readable.holds_text("retired id")


def test_ids_erased_during_a_load_are_not_shown(sink: Sink, readable: Readable, items: Collection) -> None:
    publish(items, 1)

    class Slow:
        """The sink, whose load sees an erasure before its first row."""

        holds, purge, drop = sink.holds, sink.purge, sink.drop
        loads = 0

        def load(self, content: Any) -> None:
            self.loads += 1
            if self.loads == 1:
                items.erase(["item 17"], "asked for it")
                with pytest.raises(Exception, match="erased"):
                    sink.load(content)
                assert readable.rows("items") is None
                raise ConnectionError("as a client would say it")
            sink.load(content)

    assert sync(items, NAME, Slow())
    assert readable.rows("items") == expected(items)
    assert not readable.holds_text("item 17")


def test_readers_see_one_whole_version_while_others_are_loaded(
    sink: Sink, readable: Readable, items: Collection
) -> None:
    ids = np.arange(3000)
    publish(items, 1, ids)
    sync(items, NAME, sink)
    ended, seen = threading.Event(), set()

    def read() -> None:
        while not ended.is_set():
            rows = readable.rows("items")
            assert rows is not None
            seen.add((len(rows), *{(row[1], row[3]) for row in rows.values()}))

    reader = threading.Thread(target=read)
    reader.start()
    for number in (2, 3, 4):
        publish(items, number, ids)
        sync(items, NAME, sink)
    ended.set()
    reader.join()
    assert seen <= {(3000, (float(number), f"v{number:06d}")) for number in (1, 2, 3, 4)}


@pytest.mark.process
def test_a_killed_load_leaves_what_readers_saw_and_the_next_one_finishes(
    sink: Sink, readable: Readable, items: Collection, tmp_path: Path
) -> None:
    publish(items, 1)
    sync(items, NAME, sink)
    publish(items, 2)
    before = expected(items) | {}
    program = textwrap.dedent(
        f"""
        import time
        from embeddings.sinks import follow
        from embeddings.sinks.registry import open_sink
        from embeddings.store import open_store

        content_of = follow._content
        def stuck(*arguments):
            content = content_of(*arguments)
            def batches():
                yield from content.batches()
                print("loaded", flush=True)
                time.sleep(600)
            return follow.Content(**{{**vars(content), "batches": batches}})
        follow._content = stuck
        follow.sync(open_store({str(tmp_path / "store")!r}).collection("items"), {NAME!r}, open_sink({readable.url!r}))
        """
    )
    loader = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert loader.stdout is not None
        assert loader.stdout.readline() == b"loaded\n"
        with pytest.raises(SinkBusy):
            sync(items, NAME, sink)
    finally:
        loader.kill()
        loader.communicate()
    rows = readable.rows("items")
    assert rows is not None
    assert {row[3] for row in rows.values()} == {"v000001"}
    sync_when_free(items, NAME, sink)
    assert readable.rows("items") == before


def test_a_table_of_somebody_else_is_left_alone(sink: Sink, readable: Readable, items: Collection) -> None:
    readable.make_other("items")
    publish(items, 1)
    with pytest.raises(SinkError, match="not Evenkeel's"):
        sync(items, NAME, sink)
    sink.drop("items")
    with pytest.raises(SinkError, match="not Evenkeel's"):
        sync(items, NAME, sink)


def test_a_sink_that_is_detached_loses_its_table(sink: Sink, readable: Readable, items: Collection) -> None:
    publish(items, 1)
    sync(items, NAME, sink)
    attach(items, [])
    assert sync(items, NAME, sink)
    assert readable.rows("items") is None
    assert not readable.holds_text("item 17")
    assert sinks_of(items) == []
    attach(items, [NAME])
    sync(items, NAME, sink)
    assert readable.rows("items") == expected(items)
