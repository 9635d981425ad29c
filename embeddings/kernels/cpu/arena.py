"""Memory that is used again: a lookup of many rows would else spend longer on page faults than on its rows."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch

# Buffers that are kept: a few lookups before one backward. What more are in use at once are not kept.
MAX_BUFFERS = 4
# What getrefcount gives for a buffer that the list of buffers, a variable and the call itself refer to.
_UNUSED = 3
_LINE = 64


class Arena:
    """Tensors in buffers that are used again once nothing refers to the tensor, its views and its graph any more.

    A copy of an arena is a new one.
    """

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def take(self, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, dim], not initialised, at a cache line."""
        num_bytes = num_rows * dim * dtype.itemsize
        raw = self._free_buffer(num_bytes + _LINE)
        start = -raw.ctypes.data % _LINE
        # The tensor refers to the slice, the slice to the buffer: its reference count says whether it is in use.
        return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(num_rows, dim)

    def _free_buffer(self, num_bytes: int) -> np.ndarray:
        unused = []
        # Not enumerate: it would refer to the buffer as well.
        for i in range(len(self._buffers)):
            raw = self._buffers[i]
            if sys.getrefcount(raw) <= _UNUSED:
                if len(raw) >= num_bytes:
                    return raw
                unused.append(i)
        # Sequences differ in length: a quarter more than the longest so far is soon enough for all.
        raw = np.empty(num_bytes if not unused else math.ceil(1.25 * num_bytes), dtype=np.uint8)
        for i in reversed(unused):
            del self._buffers[i]
        if len(self._buffers) < MAX_BUFFERS:
            self._buffers.append(raw)
        return raw

    def __deepcopy__(self, memo: dict[int, Any]) -> Arena:
        return Arena()

    def __reduce__(self) -> tuple[type[Arena], tuple[()]]:
        return Arena, ()


class Room:
    """Arrays to work with, by name: as long as asked for at least, and kept. A copy of a room is a new one."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def __call__(self, name: str, count: int, dtype: Any) -> np.ndarray:
        """``count`` elements with whatever was left in them."""
        array = self._arrays.get(name)
        if array is None or len(array) < count:
            array = self._arrays[name] = np.empty(count if array is None else math.ceil(1.25 * count), dtype=dtype)
        return array[:count]

    def __deepcopy__(self, memo: dict[int, Any]) -> Room:
        return Room()

    def __reduce__(self) -> tuple[type[Room], tuple[()]]:
        return Room, ()
