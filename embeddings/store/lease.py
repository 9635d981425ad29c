"""A lock in a remote store that expires by itself, so that a dead writer blocks others no longer than a lease."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from embeddings.store.files import StoreBusy, StoreError

TIMEOUT_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 1.0


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the seconds of a clock that also runs while the machine is suspended, as the server's clock does.

    Systems without such a clock use another monotonic clock.
    """
    return time.clock_gettime(_CLOCK)


class Leased(Protocol):
    """Interface of a remote lock; ``token`` identifies the writer."""

    def acquire(self, token: str) -> bool:
        """Take the lock if it is free; return True if it was taken."""
        ...

    def renew(self, token: str) -> None:
        """Extend the lock by another lease; raise StoreError if that fails, or if another writer has the lock."""
        ...

    def release(self, token: str) -> None:
        """Release the lock, if it is still held by ``token``."""
        ...


class Lease:
    """A lock that was taken; :meth:`check` tells by this process's own clock if it is still held."""

    def __init__(self, token: str, seconds: float, where: str):
        self.token = token
        self._seconds = seconds
        self._where = where
        self.renewed_at = now()

    def check(self) -> None:
        """Raise StoreBusy if the lease may have ended: another writer may be writing."""
        if now() - self.renewed_at >= self._seconds:
            raise StoreBusy(
                f"{self._where}: this writer was away for longer than its lock of {self._seconds:g} s lasts, so "
                "another may be writing: nothing was published and what is served is unchanged; run again"
            )


@contextlib.contextmanager
def leased(
    lock: Leased, token: str, seconds: float, where: str, timeout_seconds: float | None = None
) -> Iterator[Lease]:
    """Take ``lock``, renew it from a thread inside this context, and release it at the end.

    A lease lasts ``seconds``; without ``timeout_seconds`` the longest wait for the lock is TIMEOUT_SECONDS or two
    leases, whichever is longer. ``where`` begins error messages.

    Raises:
        StoreBusy: another process held the lock for ``timeout_seconds``.
    """
    if timeout_seconds is None:
        timeout_seconds = max(TIMEOUT_SECONDS, 2 * seconds)
    deadline = now() + timeout_seconds
    asked_at = now()
    pause_seconds = 0.1
    while not lock.acquire(token):
        if now() > deadline:
            raise StoreBusy(
                f"{where}: another process has kept the writer lock for {timeout_seconds:g} s: end it if it is stuck, "
                "then try again"
            )
        time.sleep(random.uniform(0.1, 1.0) * pause_seconds)
        pause_seconds = min(1.5 * pause_seconds, LONGEST_PAUSE_SECONDS)
        asked_at = now()
    lease = Lease(token, seconds, where)
    lease.renewed_at = asked_at
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(seconds / 3):
            asked = now()
            # A lease that cannot be renewed ends, and the next check raises.
            with contextlib.suppress(StoreError, OSError):
                # Check before and after renewing: after a long wait the lock may belong to another writer.
                lease.check()
                lock.renew(token)
                lease.check()
                lease.renewed_at = asked

    keeper = threading.Thread(target=keep, name="store-lease", daemon=True)
    keeper.start()
    try:
        yield lease
    finally:
        ended.set()
        keeper.join()
        with contextlib.suppress(StoreError, OSError):
            lock.release(token)
