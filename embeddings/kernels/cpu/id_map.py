"""The compiled map from raw 64-bit ids to entries (src/id_map.h), for embeddings.dynamic."""

from __future__ import annotations

from ctypes import byref, c_int64

import numpy as np

from embeddings.kernels.cpu import library as native
from embeddings.kernels.cpu.library import library

# What `numbers` holds, and why `admit` came back: see src/id_map.h.
HIGH, FREE, COUNT, COUNTED, NEW, REFUSED = range(6)
NUM_NUMBERS = 6
DONE, FULL_MAP, NO_ENTRY, FULL_COUNTERS = range(4)


def find(ids: np.ndarray, entries: np.ndarray, slots: np.ndarray, shift: int, mask: int) -> None:
    """Write the entry of each id, -1 for ids that are not there."""
    described = native.IdMap(slots=slots.ctypes.data, shift=shift, mask=mask)
    library().id_map_find(byref(described), ids.ctypes.data, len(ids), entries.ctypes.data)


def touch(
    ids: np.ndarray, entries: np.ndarray, slots: np.ndarray, shift: int, mask: int, last_seen: np.ndarray, step: int,
    misses: np.ndarray,
) -> int:  # fmt: skip
    """Find entries, note the step at each, and return how many ids have none: their positions go to ``misses``."""
    described = native.IdMap(
        slots=slots.ctypes.data, last_seen=last_seen.ctypes.data, shift=shift, mask=mask
    )  # fmt: skip
    found: int = library().id_map_touch(
        byref(described), ids.ctypes.data, len(ids), entries.ctypes.data, step, misses.ctypes.data
    )
    return found


def admit(
    ids: np.ndarray, entries: np.ndarray, misses: np.ndarray, start: int, is_counted: bool, slots: np.ndarray,
    shift: int, mask: int, ids_of: np.ndarray, last_seen: np.ndarray, step: int, free: np.ndarray, capacity: int,
    numbers: np.ndarray, new_entries: np.ndarray, admission_threshold: int, current: np.ndarray, previous: np.ndarray,
    block_shift: int, count_limit: int, refuse: bool,
) -> tuple[int, int]:  # fmt: skip
    """Count the missing ids from ``misses[start]`` on, and admit the ids that occurred often enough.

    Return the position in ``misses`` where that stopped, and why. A parameter for each array and number of the map that
    the C function reads: they are its caller's attributes, and become one struct here.
    """
    described = native.IdMap(
        slots=slots.ctypes.data, ids_of=ids_of.ctypes.data, last_seen=last_seen.ctypes.data, free=free.ctypes.data,
        numbers=numbers.ctypes.data, current=current.ctypes.data, previous=previous.ctypes.data, mask=mask,
        shift=shift, capacity=capacity, admission_threshold=admission_threshold, block_shift=block_shift,
        count_limit=count_limit,
    )  # fmt: skip
    position = c_int64(start)
    why = library().id_map_admit(
        byref(described), ids.ctypes.data, entries.ctypes.data, misses.ctypes.data, len(misses), byref(position),
        is_counted, step, new_entries.ctypes.data, refuse,
    )  # fmt: skip
    return position.value, why


def put_all(entries: np.ndarray, ids_of: np.ndarray, slots: np.ndarray, shift: int, mask: int) -> None:
    """Put the ids of these entries into an empty map."""
    described = native.IdMap(slots=slots.ctypes.data, ids_of=ids_of.ctypes.data, shift=shift, mask=mask)
    library().id_map_put(byref(described), entries.ctypes.data, len(entries))


def remove_all(entries: np.ndarray, ids_of: np.ndarray, slots: np.ndarray, shift: int, mask: int) -> None:
    """Take the ids of these entries out."""
    described = native.IdMap(slots=slots.ctypes.data, ids_of=ids_of.ctypes.data, shift=shift, mask=mask)
    library().id_map_remove(byref(described), entries.ctypes.data, len(entries))
