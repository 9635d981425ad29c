"""A cache of results read from files, valid as long as the files are unchanged.

The cache avoids reading the same Parquet footers again for every job on the same dataset.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from trainer.data.sources.locations import FilePath

Result = TypeVar("Result")
State = tuple[tuple[str, int, int, int, int, int], ...]

SETTLED_SECONDS = 2.0
"""Age from which a file's timestamp is trusted; a younger file may change again within one tick of the clock."""


class FileCache(Generic[Result]):
    """Thread-safe cache of the latest ``size`` results. A call that raises leaves no entry."""

    def __init__(self, size: int = 512):
        self._size = size
        self._kept: OrderedDict[tuple[Hashable, State], Result] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, files: Iterable[FilePath], look: Callable[[], Result]) -> Result:
        """Return ``look()``, cached under ``key`` while ``files`` are unchanged.

        Files count as unchanged if their paths, inodes, sizes and times are equal; for objects, paths, sizes and times
        as they were listed.
        """
        files = list(files)
        state = _state(files)
        if not state:
            return look()
        with self._lock:
            if (key, state) in self._kept:
                self._kept.move_to_end((key, state))
                return self._kept[key, state]
        result = look()
        newest = max(max(file_state[4:]) for file_state in state)
        if newest < time.time_ns() - SETTLED_SECONDS * 1e9 and _state(files) == state:
            with self._lock:
                self._kept[key, state] = result
                if len(self._kept) > self._size:
                    self._kept.popitem(last=False)
        return result


def _state(files: Iterable[FilePath]) -> State | None:
    """Return the state of the files, following links, or None if one cannot be examined."""
    stats = []
    try:
        for file in files:
            if not isinstance(file, Path):
                size, changed_ns = file.stat()
                stats.append((str(file), 0, 0, size, changed_ns, changed_ns))
                continue
            stat = os.stat(file)
            stats.append((str(file), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except OSError:
        return None
    return tuple(stats)
