"""A writer's lock: taken, renewed, ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from embeddings.store import StoreBusy

pytestmark = pytest.mark.process


def test_a_lock_that_is_taken_and_a_lock_that_ended(redis_server: Any, tmp_path: Path) -> None:
    from embeddings.store.backends.redis import InRedis, connect
    from embeddings.store.lease import leased
    from embeddings.store.url import parse_store_url

    url = parse_store_url(f"{redis_server.url}?cache={tmp_path}", 0.0, ())
    lock = InRedis(connect(url.address), "p:", "items", url, 0.0)
    with leased(lock, "one", 30.0, "here") as lease:
        lease.check()
        with pytest.raises(StoreBusy, match="has kept the writer lock"):
            with leased(lock, "two", 30.0, "here", timeout_seconds=0.05):
                pass
        lease.renewed_at -= 31.0
        with pytest.raises(StoreBusy, match="away for longer"):
            lease.check()
    with leased(lock, "two", 30.0, "here", timeout_seconds=0.05):
        pass


class Renewals:
    """A lock that is free."""

    def __init__(self) -> None:
        self.renewed = threading.Event()

    def acquire(self, token: str) -> bool:
        return True

    def renew(self, token: str) -> None:
        self.renewed.set()

    def release(self, token: str) -> None:
        pass


def test_a_lease_is_renewed() -> None:
    from embeddings.store.lease import leased

    lock = Renewals()
    with leased(lock, "one", 3.0, "here"):
        assert lock.renewed.wait(300)


def test_a_lease_that_ended_is_not_renewed() -> None:
    """A writer that was stopped for longer than its lock lasts: somebody else may have it."""
    from embeddings.store.lease import leased

    lock = Renewals()
    with leased(lock, "one", 0.3, "here") as lease:
        lease.renewed_at -= 1.0
        assert not lock.renewed.wait(0.5)
        with pytest.raises(StoreBusy, match="away for longer"):
            lease.check()


def test_a_lease_ends_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended, the monotonic clock stands still, and the server's goes on."""
    from embeddings.store.lease import leased

    slept_seconds = 0.0
    ask = time.clock_gettime
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: ask(clock) + (slept_seconds if clock == time.CLOCK_BOOTTIME else 0.0)
    )
    with leased(Renewals(), "one", 600.0, "here") as lease:
        lease.check()
        slept_seconds = 601.0
        with pytest.raises(StoreBusy, match="away for longer"):
            lease.check()
