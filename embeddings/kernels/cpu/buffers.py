"""Reuse of memory, because a lookup of many rows in fresh memory spends most of its time on page faults."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import numpy as np
import torch

# Most unused buffers that are kept: enough for a few lookups before one backward.
MAX_BUFFERS = 4
_LINE = 64


class BufferPool:
    """A pool of buffers for tensors; a buffer is reused when its tensor, the tensor's views and graph are gone.

    Copying a pool gives a new, empty pool.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        # A buffer may come back while another is taken: in a garbage collection, or from another thread.
        self._lock = threading.RLock()

    def take(self, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [num_rows, dim] that starts at a cache line."""
        num_bytes = num_rows * dim * dtype.itemsize
        buffer = self._free_buffer(num_bytes + _LINE)
        lease = np.frombuffer(buffer.data, np.uint8)
        weakref.finalize(lease, self._give_back, buffer).atexit = False
        start = -lease.ctypes.data % _LINE
        return torch.from_numpy(lease[start : start + num_bytes]).view(dtype).view(num_rows, dim)

    def _free_buffer(self, num_bytes: int) -> np.ndarray:
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= num_bytes:
                    return self._free.pop(i)
            # Sequences differ in length: with a quarter to spare, a buffer soon fits every batch.
            grown = math.ceil(1.25 * num_bytes) if self._free else num_bytes
            self._free.clear()
        return np.empty(grown, dtype=np.uint8)

    def _give_back(self, buffer: np.ndarray) -> None:
        with self._lock:
            if len(self._free) < MAX_BUFFERS:
                self._free.append(buffer)

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferPool:
        return BufferPool()

    def __reduce__(self) -> tuple[type[BufferPool], tuple[()]]:
        return BufferPool, ()
