"""Directories of runs on a host without a shared directory: in the host's cache, kept while a process works in them."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from trainer.storage.cache import cache_of_host, locked

_held: dict[Path, int] = {}
"""Locks that this process holds until it ends."""


def working_directory(run_id: str, part: str) -> Path:
    """Return this host's directory for a part of a run: ``driver``, ``ranks`` or ``tasks``; make it if needed.

    A lock keeps it until this process ends. Directories of other runs that no process locks are removed.
    """
    runs = cache_of_host().folder / "runs"
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = runs / f"{run_id}.lock"
    if own not in _held:
        _held[own] = locked(own, fcntl.LOCK_SH)
    for lock in runs.glob("*.lock"):
        if lock != own:
            _remove_left(lock)
    directory = runs / run_id / part
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _remove_left(lock: Path) -> None:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
