"""Free disk space under EVENKEEL_HOME, compared with the limits for starting runs and for writing at all."""

from __future__ import annotations

import os
import shutil
from typing import Literal, NamedTuple

from service.core.settings import MIN_FREE_BYTES, Settings

Level = Literal["ok", "low", "reserved", "full"]
READ_ONLY = "is on a file system that is mounted read-only: mount it writable"


class Space(NamedTuple):
    """Free disk space, and the level that it amounts to.

    Level ``low``: space should be freed soon. ``reserved``: no run is started, but running runs may finish. ``full``:
    nothing is written.
    """

    free_bytes: int
    level: Level
    message: str


def space(settings: Settings) -> Space:
    """Compare the free space under ``EVENKEEL_HOME`` with its limits.

    Raises:
        OSError: The file system of ``EVENKEEL_HOME`` cannot be examined.
    """
    free = shutil.disk_usage(settings.home).free
    if is_read_only(settings):
        return Space(free, "full", f"EVENKEEL_HOME {READ_ONLY}")
    free_text = f"{free / 1e9:.2f} GB free under EVENKEEL_HOME"
    if free < MIN_FREE_BYTES:
        return Space(free, "full", f"{free} bytes free under EVENKEEL_HOME: make room")
    if free < settings.disk_reserve_bytes:
        return Space(free, "reserved", f"{free_text}: no run is started below {_reserve(settings)}")
    if free < settings.disk_warn_bytes:
        return Space(free, "low", f"{free_text}: make room, because no run is started below {_reserve(settings)}")
    return Space(free, "ok", "ok")


def is_read_only(settings: Settings) -> bool:
    """Return True if the file system of ``EVENKEEL_HOME`` is mounted read-only; raises OSError like :func:`space`."""
    return bool(os.statvfs(settings.home).f_flag & os.ST_RDONLY)


def shortage(settings: Settings) -> str | None:
    """Return the shortage of disk space that prevents runs from starting, or None."""
    current = space(settings)
    if current.level in ("ok", "low"):
        return None
    if current.level == "full":
        return current.message
    return (
        f"{current.free_bytes / 1e9:.2f} GB free under EVENKEEL_HOME, but a run needs at least "
        f"{_reserve(settings)} (EVENKEEL_DISK_RESERVE_BYTES) to start: make room, and it starts by itself"
    )


def _reserve(settings: Settings) -> str:
    return f"{settings.disk_reserve_bytes / 1e9:.2f} GB"
