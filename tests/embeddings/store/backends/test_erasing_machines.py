"""Machines that erase ids from one collection in Redis at once, each with a mirror of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from embeddings.store import Collection, Store
from embeddings.store.collection import erasure
from embeddings.vectors.item_vectors import MISSING
from tests.embeddings.store.backends.versions import publish

pytestmark = pytest.mark.process


class Killed(BaseException):
    """The process is no more."""


@pytest.fixture
def machines(opened: Callable[..., Store]) -> tuple[Collection, Collection]:
    """Two machines, and a collection with two versions."""
    one, other = (opened("grace_seconds=0").collection("items") for _ in range(2))
    for number in (1, 2):
        publish(one, number)
    return one, other


def meanwhile(patch: pytest.MonkeyPatch, call: Callable[[], Any], killed_at: int = 0) -> None:
    """``call`` happens before the first rows without the ids are written; who writes the ``killed_at``-th is killed."""
    write_items, written = erasure.write_items, []

    def interrupted(*arguments: Any) -> Any:
        written.append(arguments[0])
        if len(written) == 1:
            call()
        elif len(written) == killed_at:
            raise Killed
        return write_items(*arguments)

    patch.setattr(erasure, "write_items", interrupted)


def assert_erased(collection: Collection, ids: list[int]) -> None:
    for version in ("v000001", "v000002"):
        assert (collection.lookup(ids, version)[1] == MISSING).all()
        assert (collection.lookup(np.arange(100, 200), version)[1] != MISSING).all()
    notes = collection.erasures()
    assert [note["ids"] for note in notes] == [1] * len(ids)
    assert sum(note["rows"] for note in notes) == 2 * len(ids)
    assert not any("token" in note for note in notes)


def test_what_is_recorded_while_another_machine_erases_is_not_lost(
    machines: tuple[Collection, Collection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second machine is killed when it has recorded its id."""
    one, other = machines

    def record() -> None:
        with pytest.raises(Killed):
            other.erase([42], "second")

    meanwhile(monkeypatch, record, killed_at=2)
    assert one.erase([17], "first") == {"versions": ["v000001", "v000002"], "rows": 2}
    assert_erased(one, [17, 42])


def test_an_erasure_that_another_machine_finished(
    machines: tuple[Collection, Collection], monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Store]
) -> None:
    one, other = machines
    answers: list[Any] = []
    meanwhile(monkeypatch, lambda: answers.append(other.erase([42], "second")))
    answers.insert(0, one.erase([17], "first"))
    assert_erased(opened().collection("items"), [17, 42])
    # Who rewrote what is told alike by the answers and by the log.
    assert [(note["versions"], note["rows"]) for note in one.erasures()] == [
        (answer["versions"], answer["rows"]) for answer in answers
    ]


def test_rows_that_another_machine_took_away_do_not_come_back(
    machines: tuple[Collection, Collection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine has the first version open, of which the second one takes another id meanwhile."""
    one, other = machines
    write_items, written, others = erasure.write_items, [], []
    is_between, may_go_on = threading.Event(), threading.Event()
    second = threading.Thread(target=lambda: other.erase([42], "second"))

    def interrupted(*arguments: Any) -> Any:
        if threading.current_thread() is second:
            others.append(arguments[0])
            if len(others) == 2:
                is_between.set()
                assert may_go_on.wait(60)
        else:
            written.append(arguments[0])
            if len(written) == 1:
                second.start()
                assert is_between.wait(60)
            elif len(written) == 3:
                may_go_on.set()
                second.join()
        return write_items(*arguments)

    monkeypatch.setattr(erasure, "write_items", interrupted)
    one.erase([17], "first")
    assert_erased(one, [17, 42])


def test_an_erasure_that_a_publication_finished(
    machines: tuple[Collection, Collection], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machines
    ids = np.delete(np.arange(3000), 17)
    meanwhile(monkeypatch, lambda: publish(other, 3, np.full((2999, 8), 3.0, dtype=np.float32), ids))
    one.erase([17], "asked for")
    assert one.current() == "v000003"
    assert_erased(one, [17])
