"""The EVENKEEL_HOME whose jobs a runner runs: its id, and the lock that one runner at a time holds."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from embeddings.durable_files import write_file
from service.core import tables


class HomeLock:
    """The lock on ``runner.lock``; the kernel releases it when the process dies."""

    def __init__(self, home: Path):
        self._home = home
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock if it is free, and return whether this process holds it."""
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._home / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_home_id(home: Path) -> str | None:
    """Return the id of the home; None if no job has run under it."""
    try:
        return (home / "home.id").read_text("ascii").strip()
    except FileNotFoundError:
        return None


def home_id(home: Path) -> str:
    """Return an id that stays with the directory, wherever it is mounted and whatever the host's name."""
    identifier = read_home_id(home)
    if identifier is None:
        identifier = tables.new_id("home")
        write_file(home / "home.id", f"{identifier}\n".encode())
    return identifier
