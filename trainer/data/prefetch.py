"""Prefetching: a thread makes the next items of a loop while the loop works. Torch-free."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PREFETCH_BATCHES = 4
_END = object()


class Prefetched(Generic[T], Iterator[T]):
    """``make(start)`` ... ``make(stop - 1)`` in this order, at most ``depth`` of them ahead of the reader.

    The first item is made when it is requested, or after :meth:`begin`. An error of ``make`` is raised to the reader at
    the position of its item; StopIteration ends the items. The thread ends with the last item, with :meth:`close`, or
    when this object is garbage-collected. ``on_close`` is called then, to interrupt a wait in ``make``.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        start: int,
        stop: int,
        depth: int = PREFETCH_BATCHES,
        on_close: Callable[[], None] = lambda: None,
    ):
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._next: tuple[object, Any] | None = None
        self._stopped = threading.Event()
        self._on_close = on_close
        # The thread must not refer to this object, which otherwise would never be garbage-collected.
        arguments = (_work, make, start, stop, self._ready, self._stopped)
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=arguments, name="evenkeel-batches", daemon=True)
        weakref.finalize(self, _stop, self._stopped, on_close)

    def begin(self) -> Prefetched[T]:
        """Start the thread if it is not running yet."""
        if self._thread.ident is None and not self._stopped.is_set():
            self._thread.start()
        return self

    def wait(self, seconds: float) -> bool:
        """Return True if the next item, or the end, is ready within this many seconds."""
        if self._next is None and not self._stopped.is_set():
            self.begin()
            with contextlib.suppress(queue.Empty):
                self._next = self._ready.get(timeout=seconds)
        return self._next is not None or self._stopped.is_set()

    def __next__(self) -> T:
        if self._stopped.is_set():
            raise StopIteration
        self.begin()
        (kind, item), self._next = self._next or self._ready.get(), None
        if kind is _END:
            self.close()
            if item is not None:
                raise item
            raise StopIteration
        return item

    def close(self) -> None:
        """End the thread, and wait for the item that it is making; no more items come."""
        _stop(self._stopped, self._on_close)
        self._next = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        if self._thread.ident is not None:
            self._thread.join()


def read_ahead(items: Iterator[T], depth: int = 1, on_close: Callable[[], None] = lambda: None) -> Prefetched[T]:
    """Return the items of an iterator, which a thread reads ahead while the reader works."""
    return Prefetched(lambda number: next(items), 0, sys.maxsize, depth, on_close)


def _stop(stopped: threading.Event, on_close: Callable[[], None]) -> None:
    stopped.set()
    on_close()


def _work(make: Callable[[int], Any], start: int, stop: int, ready: queue.Queue[Any], stopped: threading.Event) -> None:
    def put(kind: object, item: Any) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((kind, item), timeout=0.1)
                return True
        return False

    try:
        for number in range(start, stop):
            if not put(None, make(number)):
                return
        put(_END, None)
    except BaseException as error:
        put(_END, error)
