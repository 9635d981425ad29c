"""Items made ahead: the same ones in the same order, never more than the bound, and no thread that outlives them."""

from __future__ import annotations

import gc
import threading

import pytest

from trainer.data.prefetch import Prefetched

DEADLINE = 60.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "evenkeel-batches"]


def test_items_come_in_order():
    assert list(Prefetched(lambda number: number * number, 3, 40, depth=2)) == [n * n for n in range(3, 40)]
    assert not threads()


def test_making_begins_when_it_is_told_to_and_stops_at_the_bound():
    made, at_bound = [], threading.Event()

    def make(number):
        made.append(number)
        if len(made) == 4:  # three wait, and one is made that finds no room
            at_bound.set()
        return number

    ahead = Prefetched(make, 0, 100, depth=3)
    assert not threads()
    ahead.begin().begin()
    assert at_bound.wait(DEADLINE)
    assert made == [0, 1, 2, 3]
    next(ahead)
    ahead.close()
    assert len(made) <= 5
    assert list(ahead) == []
    assert not threads()


def test_errors_are_raised_in_their_place():
    def make(number):
        if number == 2:
            raise OSError("the disk is gone")
        return number

    received = []
    with pytest.raises(OSError, match="the disk is gone"):
        received.extend(iter_into(Prefetched(make, 0, 5), received))
    assert received == [0, 1]
    assert not threads()


def iter_into(items, received):
    for item in items:
        received.append(item)
    return ()


def test_a_reader_that_is_dropped_ends_the_thread():
    ahead = Prefetched(lambda number: number, 0, 1000).begin()
    (thread,) = threads()
    del ahead
    gc.collect()
    thread.join(DEADLINE)
    assert not thread.is_alive()
