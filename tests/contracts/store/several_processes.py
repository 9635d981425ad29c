"""Several processes at one store: readers follow, writers take turns, erasures reach all."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from embeddings.store import Collection, StaleParent, StoreError, UnknownVersion
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors
from tests.contracts.store.base import Base, Reopen, items, publish


class SeveralProcesses(Base):
    def test_others_follow(self, collection: Collection, again: Reopen) -> None:
        first = publish(collection, items([1, 2], 1))
        collection.create_view("v")
        other = again().collection("items")
        assert other.open().version == first
        assert other.view("v") == collection.view("v")
        second = publish(collection, items([1, 2], 2))
        assert other.current() == second
        assert other.open().lookup([2])[1][0, 0] == 2
        other.promote(first, "back")
        assert collection.current() == first
        assert collection.history()[-1]["reason"] == "back"
        third = collection.write(items([1], 3), parent=first)
        other.hold(third, ["no"])
        assert collection.manifest(third)["reasons"] == ["no"]
        other.save_settings("canary", "genre", {"threshold": 0.5})
        assert collection.settings("canary") == {"genre": {"threshold": 0.5}}
        other.delete_view("v")
        assert collection.views() == []
        assert again().collections() == ["items"]

    def test_writers_take_turns(self, collection: Collection, again: Reopen) -> None:
        """Numbers are given once, and of several who publish on one parent one does."""
        parent = publish(collection, items([1], 1))
        ends: list[object] = []

        def refresh(number: int) -> None:
            own = again().collection("items")
            version = own.write(items([1], number), parent=parent)
            try:
                own.publish(version, parent)
                ends.append(version)
            except StaleParent:
                ends.append(None)

        threads = [threading.Thread(target=refresh, args=(number,)) for number in (2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (served,) = [end for end in ends if end is not None]
        assert len(ends) == 3
        assert collection.current() == served
        assert [manifest["version"] for manifest in collection.versions()] == [f"v{n:06d}" for n in range(1, 5)]
        assert collection.open().vectors.shape == (1, 4)

    def test_nothing_is_torn(self, collection: Collection, again: Reopen) -> None:
        """Every vector of version N is N everywhere, and readers see no version but whole ones, and none before."""
        ids = np.arange(300)
        stop = threading.Event()
        problems: list[str] = []
        num_reads = [0, 0]
        publish(collection, ItemVectors(ids, np.full((300, 4), 1.0)))

        def read(number: int) -> None:
            own = again().collection("items")
            latest = 0
            while not stop.is_set() or num_reads[number] < 3:
                try:
                    time.sleep(0.001)
                    reader = own.open()
                    status, vectors = reader.lookup(ids)
                except UnknownVersion as error:
                    problems.append(f"gone within its grace: {error}")
                    return
                served = int(reader.version[1:])
                if not (status == FOUND).all() or not (vectors == served).all() or served < latest:
                    problems.append(f"{reader.version} after {latest} holds {np.unique(vectors)}")
                    return
                latest = served
                num_reads[number] += 1

        threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in range(2, self.num_switches + 2):
                publish(collection, ItemVectors(ids, np.full((300, 4), float(number))))
                collection.retain(2)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert problems == []
        assert min(num_reads) >= 3

    # --- erasure ---------------------------------------------------------------------------------------------------

    def test_erased_ids_leave_every_version_and_stay_out(self, collection: Collection, again: Reopen) -> None:
        versions = [publish(collection, items([1, 2, 3, 4], fill=number)) for number in (1, 2, 3)]
        publish(collection, items([1, 3, 4], fill=4))
        kept = {version: collection.open(version).lookup([1, 3, 4])[1].copy() for version in versions}
        done = collection.erase([2, 9], "they asked")
        assert done["rows"] == 3
        assert set(versions) <= set(done["versions"])
        for where in (collection, again().collection("items")):
            for version in versions:
                status, vectors = where.open(version).lookup([1, 2, 3, 4])
                assert status.tolist() == [FOUND, MISSING, FOUND, FOUND]
                np.testing.assert_array_equal(vectors[[0, 2, 3]], kept[version])
                assert where.manifest(version)["rows"] == 3
            assert where.open().lookup([1, 2])[0].tolist() == [FOUND, MISSING]
            with pytest.raises(StoreError, match="were erased"):
                where.write(items([2, 5]))
        assert collection.readmit([2, 3], "they came back") == 1
        publish(collection, items([1, 2, 3], fill=5))
        assert again().collection("items").open().lookup([1, 2])[0].tolist() == [FOUND, FOUND]
        assert [note["kind"] for note in again().collection("items").erasures()] == ["erase", "readmit"]
