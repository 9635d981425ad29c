"""Runs brief work on the event loop itself, as long as the work reads only from memory.

Reading a hundred rows of mapped memory takes less time than a switch to another thread and back, because Python's
threads block each other for milliseconds (docs/adr/0020).

A page that must be read from disk would block all other requests. The kernel counts these page faults. After a page
fault, threads do the work for a moment, and for longer after each later fault. Reads from a file server, which may
never answer, are always done by threads.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from embeddings.store import Store

Result = TypeVar("Result")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 1.0
REMOTE_FILE_SYSTEMS = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gluster", "gpfs", "lustre", "nfs", "smb")
"""Prefixes of file system types that are, or may be, on another machine."""
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts only per process


class InlineIO:
    """Decides whether brief work may be done on the event loop now. Used by one event loop's thread only."""

    def __init__(
        self, local: bool = True, waits: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic
    ):
        """Configure whether files are local and how waits for the disk are counted.

        ``waits`` returns the number of times that this thread has waited for a page from disk; default: the kernel's
        count.
        """
        self._local = local
        self._waits = waits or major_faults
        self._clock = clock
        self._not_before = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def allowed(self) -> bool:
        """Return True if files are local and recent reads needed memory only."""
        return self._local and self._clock() >= self._not_before

    def call(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` in this thread and return its result."""
        before = self._waits()
        try:
            return work()
        finally:
            if self._waits() > before:
                self._not_before = self._clock() + self._pause_seconds
                self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
            else:
                self._pause_seconds = FIRST_PAUSE_SECONDS


def major_faults() -> int:
    """Return the number of pages that this thread had to wait for while they were read from disk."""
    return resource.getrusage(_WHO).ru_majflt


def is_local(store: Store) -> bool:
    """Return True if a store's files are on a disk of this machine, as far as the mounts show."""
    return not store.is_remote and not kind_of_mount(store.root).startswith(REMOTE_FILE_SYSTEMS)


def kind_of_mount(path: Path) -> str:
    """Return the kind of file system (``ext4``, ``nfs4``, ...) of a path, which need not exist yet."""
    kinds = {mounted.mountpoint: mounted.fstype for mounted in psutil.disk_partitions(all=True)}
    path = path.resolve()
    return next((kinds[str(folder)] for folder in (path, *path.parents) if str(folder) in kinds), "")
