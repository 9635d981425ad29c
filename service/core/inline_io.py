"""What is brief is done on the event loop itself: a hundred rows of mapped memory take less time than handing them to a
thread and back, where Python's threads keep each other waiting for milliseconds (docs/adr/0042).

Pages that must be read from disk would keep everybody waiting. The kernel counts those: after one, threads do the work
for a moment, for longer each time that it happens again, and wait for the disk instead. Of a file server, which may
never answer, they do all of it.
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
SERVED_FILES = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gluster", "gpfs", "lustre", "nfs", "smb")
"""How the kinds of file systems begin that are on another machine, or may be."""
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts for the process alone


class AtOnce:
    """Whether brief work may be done now. Of one event loop's thread."""

    def __init__(
        self, local: bool = True, waits: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic
    ):
        """``local``: what is read is on this machine; ``waits``: how often this thread has waited for a page from disk,
        by default what the kernel says."""
        self._local = local
        self._waits = waits or major_faults
        self._clock = clock
        self._not_before = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def allowed(self) -> bool:
        """Whether it is local, and memory alone was read lately."""
        return self._local and self._clock() >= self._not_before

    def call(self, work: Callable[[], Result]) -> Result:
        """``work()``, here and now."""
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
    """Pages that this thread has waited for until they were read from disk."""
    return resource.getrusage(_WHO).ru_majflt


def is_local(store: Store) -> bool:
    """Whether a store's files are on a disk of this machine, as far as mounts tell."""
    return not store.lies_elsewhere and not kind_of_mount(store.root).startswith(SERVED_FILES)


def kind_of_mount(path: Path) -> str:
    """The kind of file system (``ext4``, ``nfs4``, ...) that a path, which need not exist yet, is or would be on."""
    kinds = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    path = path.resolve()
    return next((kinds[str(one)] for one in (path, *path.parents) if str(one) in kinds), "")
