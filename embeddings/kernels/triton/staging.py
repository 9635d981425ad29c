"""Copying of small arrays that change at each step to the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_LEAST_BYTES = 512
_SLOTS = 8


class _Slot:
    """Pinned memory of ``num_bytes`` bytes, and device memory of the same size."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.on_host = self.pinned.numpy()
        self.on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.copied = torch.cuda.Event()


class Staging:
    """Copies arrays to the device without waiting for running kernels.

    Pinned memory is reused, because pinning takes longer than the copy. So a returned tensor is overwritten, in stream
    order, once all slots have been used in turn for later arrays of similar size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rings: dict[int, Iterator[_Slot]] = {}

    def __call__(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Return ``values`` as ``dtype`` on the device."""
        given = np.ascontiguousarray(values, dtype=NUMPY[dtype])
        if self._device.type == "cpu":
            return torch.from_numpy(given.copy())
        num_bytes = given.nbytes
        capacity = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        if capacity not in self._rings:
            self._rings[capacity] = itertools.cycle([_Slot(capacity, self._device) for _ in range(_SLOTS)])
        slot = next(self._rings[capacity])
        slot.copied.synchronize()
        slot.on_host[:num_bytes] = given.reshape(-1).view(np.uint8)
        slot.on_device.copy_(slot.pinned, non_blocking=True)
        slot.copied.record()
        return slot.on_device[:num_bytes].view(dtype).view(given.shape)
