"""Threads that follow collections: a sink that fails is behind, says so, and holds nobody up."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from embeddings.sinks import follow, registry
from embeddings.sinks.base import Content
from embeddings.sinks.configured import ConfiguredSink
from embeddings.sinks.follow import SinkBehind, SinkFollower, attach, sinks_of, wait
from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import ItemVectors


class InMemory:
    """A sink in this process. ``fails``: an error for the next loads."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[str, list[float]]] = {}
        self.fails: Exception | None = None
        self.loads = self.purges = 0

    def holds(self, table: str) -> str | None:
        return self.tables.get(table, (None, []))[0]

    def load(self, content: Content) -> None:
        self.loads += 1
        if self.fails is not None:
            raise self.fails
        norms = [norm for batch in content.batches() for norm in batch.norms.tolist()]
        self.tables[content.table] = content.identity, norms

    def purge(self, table: str) -> None:
        self.purges += 1

    def drop(self, table: str) -> None:
        self.tables.pop(table, None)


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> dict[str, InMemory]:
    made = {"good": InMemory(), "bad": InMemory()}
    monkeypatch.setitem(registry.SINKS, "test", lambda url: made[url.removeprefix("test://")])
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def items(store: Store) -> Collection:
    return store.collection("items")


@pytest.fixture
def follower(sinks: dict[str, InMemory], store: Store) -> Iterator[SinkFollower]:
    follower = SinkFollower([ConfiguredSink(name, "default", f"test://{name}") for name in sinks], lambda tenant: store)
    yield follower
    follower.stop()


def publish(items: Collection, number: int, sinks: tuple[str, ...] = ("good", "bad")) -> None:
    rows = ItemVectors([7, 9], np.eye(2, dtype=np.float32), norms=np.full(2, number, np.float32))
    version = items.write(rows, parent=items.current())
    items.publish(version, items.current())
    attach(items, sinks)


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def shown(items: Collection, name: str) -> dict[str, object]:
    return next(sink for sink in sinks_of(items) if sink["name"] == name)


def test_a_sink_that_fails_holds_up_neither_publications_nor_other_sinks(
    items: Collection, sinks: dict[str, InMemory], follower: SinkFollower
) -> None:
    sinks["bad"].fails = ConnectionRefusedError("10.1.2.3:5432")
    follower.start()
    for number in (1, 2):
        publish(items, number)
        until(lambda: shown(items, "good")["lag_seconds"] == 0)
        assert sinks["good"].tables["items"][1] == [number, number]
    until(lambda: shown(items, "bad")["error"] is not None)
    behind = shown(items, "bad")
    assert behind["version"] is None
    assert behind["lag_seconds"] > 0  # type: ignore[operator]
    # Its address is the operator's.
    assert behind["error"] == "ConnectionRefusedError: the service's log says why"
    with pytest.raises(SinkBehind, match=r"v000002 of 'items' is served, but not in its sinks.*bad: ConnectionRefused"):
        wait(items, ["bad", "good"], 0.0, lambda: None)
    sinks["bad"].fails = None
    wait(items, ["bad", "good"], 60.0, lambda: time.sleep(0.01))
    assert shown(items, "bad")["error"] is None
    assert sinks["bad"].tables == sinks["good"].tables
    assert sinks["good"].loads == 2


def test_an_erasure_that_leaves_the_served_rows_reaches_the_sink_too(
    items: Collection, sinks: dict[str, InMemory], follower: SinkFollower
) -> None:
    publish(items, 1, ("good",))
    items.publish(items.write(ItemVectors([7], np.eye(1, 2, dtype=np.float32)), parent="v000001"), "v000001")
    follower.start()
    until(lambda: shown(items, "good")["version"] == "v000002")
    purges = sinks["good"].purges
    items.erase([9], "only the version before has it")
    until(lambda: shown(items, "good")["lag_seconds"] == 0 and sinks["good"].purges > purges)


def test_a_sink_that_lost_its_table_gets_it_again_from_the_next_process(
    items: Collection, store: Store, sinks: dict[str, InMemory], follower: SinkFollower
) -> None:
    publish(items, 1, ("good",))
    follower.start()
    until(lambda: shown(items, "good")["lag_seconds"] == 0)
    follower.stop()
    before = sinks["good"].tables.pop("items")
    again = SinkFollower([ConfiguredSink("good", "default", "test://good")], lambda tenant: store)
    again.start()
    until(lambda: sinks["good"].tables.get("items") == before)
    again.stop()


def test_the_lag_counts_from_the_first_change_that_is_missed(items: Collection, sinks: dict[str, InMemory]) -> None:
    publish(items, 1, ("good",))
    follow.sync(items, "good", sinks["good"])
    assert shown(items, "good")["lag_seconds"] == 0
    for number in (2, 3):
        publish(items, number, ("good",))
        time.sleep(0.05)
    missed = datetime.datetime.fromisoformat(str(items.history()[1]["at"]))
    age = (datetime.datetime.now(datetime.UTC) - missed).total_seconds()
    assert age - 0.001 <= shown(items, "good")["lag_seconds"] < age + 60  # type: ignore[operator]
    assert shown(items, "good")["version"] == "v000001"
    items.promote("v000001", "both are worse")
    assert shown(items, "good")["lag_seconds"] > 0  # type: ignore[operator]
    follow.sync(items, "good", sinks["good"])
    assert shown(items, "good")["lag_seconds"] == 0
    assert sinks["good"].loads == 1


def test_names_that_a_later_job_leaves_out_are_detached(items: Collection, sinks: dict[str, InMemory]) -> None:
    publish(items, 1)
    for name in sinks:
        follow.sync(items, name, sinks[name])
    attach(items, ["good"])
    assert [sink["name"] for sink in sinks_of(items)] == ["good"]
    follow.sync(items, "bad", sinks["bad"])
    assert sinks["bad"].tables == {}
    assert set(items.settings("sink")) == {"good"}
