"""Entries of a table for raw 64-bit ids that come and go while it trains.

ids = DynamicIdMap(IdMapSettings(capacity=1_000_000, admission_threshold=2, ttl_steps=50_000))
given = ids.assign(raw, step)    # training: entries, which ids were admitted, which evicted
entries = ids.find(raw)          # evaluation: changes nothing

tests/embeddings/dynamic/reference_ids.py does the same in plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_int64
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.dynamic.settings import IdMapSettings
from embeddings.kernels.cpu.library import IdMap, library

Int64s = npt.NDArray[np.int64]
_FIRST_BITS = 10
# Indices into the numbers of a map, and reasons why ``admit`` returned: see embeddings/kernels/cpu/src/id_map.h.
HIGH, FREE, COUNT, COUNTED, NEW, REFUSED = range(6)
DONE, FULL_MAP, NO_ENTRY, FULL_COUNTERS = range(4)


class Assigned(NamedTuple):
    """The result of one call of :meth:`DynamicIdMap.assign`.

    Attributes:
        entries: int64 [n], the entry of each id; -1 if the id has none and reads the row of unknown ids.
        new_entries, new_ids: int64 [k], entries that got a new id in this call, and these ids, each once.
        gone_ids: int64 [m], ids that lost their entry in this call, each once.
    """

    entries: Int64s
    new_entries: Int64s
    new_ids: Int64s
    gone_ids: Int64s


class DynamicIdMap:
    """A map from raw ids to entries 0 .. capacity - 1; :class:`IdMapSettings` has the rules of admission and eviction.

    The map depends only on the calls and their order, on every machine: ranks that assign the same ids have the same
    map. An id that occurred in the current step is never evicted. Lower entries are assigned first, and entries of
    evicted ids are assigned again.
    """

    def __init__(self, settings: IdMapSettings) -> None:
        self.settings = settings
        self._numbers = np.zeros(REFUSED + 1, dtype=np.int64)
        # np.zeros, because the operating system then allocates a page only when it is first written.
        self._ids = np.zeros(settings.capacity, dtype=np.int64)
        self._last_seen = np.zeros(settings.capacity, dtype=np.int32)
        self._free = np.zeros(settings.capacity, dtype=np.int32)
        counters = 64 * settings.num_blocks if settings.admission_threshold > 1 else 0
        self._current, self._previous = (np.zeros(counters, dtype=np.uint8) for _ in range(2))
        self._block_shift = 65 - settings.num_blocks.bit_length()
        self._step = 0
        self._make_slots(_FIRST_BITS)

    def __len__(self) -> int:
        """Return the number of ids that have an entry."""
        return int(self._numbers[COUNT])

    @property
    def step(self) -> int:
        """The step of the last call of :meth:`assign`."""
        return self._step

    @property
    def num_used(self) -> int:
        """The number of entries that were ever assigned; entries from this number on never belonged to an id."""
        return int(self._numbers[HIGH])

    @property
    def num_refused(self) -> int:
        """The number of occurrences of ids that got no entry because the table was full and none could be evicted."""
        return int(self._numbers[REFUSED])

    def ids(self) -> tuple[Int64s, Int64s]:
        """Return the entries in use, ascending, and their ids, int64 [len(self)] each."""
        entries = np.flatnonzero(self._last_seen[: self.num_used] >= 0)
        return entries, self._ids[entries]

    def find(self, ids: Int64s) -> Int64s:
        """Return the entry of each id, int64 [n], or -1 for an id without an entry."""
        ids, entries = _flat(ids), np.empty(len(ids), dtype=np.int64)
        library().id_map_find(self._described(), ids.ctypes.data, len(ids), entries.ctypes.data)
        return entries

    def assign(self, ids: Int64s, step: int) -> Assigned:
        """Return the entries of the ids of a training step, giving entries to new ids and evicting old ids as needed.

        Args:
            ids: int64 [n], repetitions allowed; new ids get entries in this order.
            step: the training step, not less than in the last call. Several calls may have the same step.

        Raises:
            ValueError: ``step`` is less than in the last call, or does not fit int32.
        """
        ids = _flat(ids)
        if step < self._step or step > np.iinfo(np.int32).max:
            raise ValueError(f"step {step} comes after step {self._step}: steps must not go back, and fit int32")
        gone = [self._expired(step)]
        self._step = step
        entries, misses = np.empty(len(ids), dtype=np.int64), np.empty(len(ids), dtype=np.int64)
        at_ids, at_entries, at_misses = (array.ctypes.data for array in (ids, entries, misses))
        count = library().id_map_touch(self._described(), at_ids, len(ids), at_entries, step, at_misses)
        self._numbers[NEW] = 0
        new_entries = np.empty(count, dtype=np.int64)
        start, why, is_counted, refuse = c_int64(0), -1, False, self.settings.eviction_policy == "refuse"
        while why != DONE:
            why = library().id_map_admit(
                self._described(), at_ids, at_entries, at_misses, count, byref(start), is_counted, step,
                new_entries.ctypes.data, refuse,
            )  # fmt: skip
            is_counted = why in (FULL_MAP, NO_ENTRY)
            if why == FULL_MAP:
                self._make_slots(self._bits + 1)
            elif why == NO_ENTRY:
                gone.append(self._oldest(step))
                refuse = not len(gone[-1])
            elif why == FULL_COUNTERS:
                self._current, self._previous = self._previous, self._current
                self._current[:] = 0
                self._numbers[COUNTED] = 0
        new_entries = new_entries[: int(self._numbers[NEW])]
        return Assigned(entries, new_entries, self._ids[new_entries], np.concatenate(gone))

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all arrays that determine later results, keyed by name, for :meth:`load`."""
        used = self.num_used
        return {
            "ids": self._ids[:used].copy(),
            "last_seen": self._last_seen[:used].copy(),
            "free": self._free[: int(self._numbers[FREE])].copy(),
            "numbers": np.append(self._numbers, self._step),
            "counters": np.concatenate([self._current, self._previous]),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a state that :meth:`state` returned, of a map with the same :class:`IdMapSettings`.

        Raises:
            ValueError: the state is of a map with other settings, or damaged; the map is then unchanged.
        """
        names = set(self.state())
        if set(state) != names:
            raise ValueError(f"the state of dynamic ids must hold {sorted(names)}, not {sorted(state)}")
        numbers = np.asarray(state["numbers"], dtype=np.int64)
        if numbers.shape != (len(self._numbers) + 1,):
            raise ValueError(f"the state of dynamic ids is damaged: numbers has shape {numbers.shape}")
        used, num_free, count = (int(numbers[each]) for each in (HIGH, FREE, COUNT))
        ids, last_seen, free = state["ids"], state["last_seen"], state["free"]
        half = len(self._current)
        if used > self.settings.capacity or len(state["counters"]) != 2 * half:
            raise ValueError(
                f"the state is of dynamic ids with {used} entries in use and {len(state['counters'])} counters, but "
                f"these have capacity {self.settings.capacity} and {2 * half} counters: use the same capacity and "
                "admission_threshold"
            )
        is_live = np.asarray(last_seen) >= 0
        if (
            not len(ids) == len(last_seen) == used
            or not len(free) == num_free == used - count
            or int(is_live.sum()) != count
            or len(np.unique(ids[is_live])) != count
            or not np.array_equal(np.sort(free), np.flatnonzero(~is_live))
        ):
            raise ValueError("the state of dynamic ids is damaged: its entries, free entries and counts do not agree")
        self._numbers[:] = numbers[:-1]
        self._step = int(numbers[-1])
        self._ids[:used], self._last_seen[:used], self._free[:num_free] = ids, last_seen, free
        self._current[:], self._previous[:] = state["counters"][:half], state["counters"][half:]
        self._make_slots(max(_FIRST_BITS, (2 * count).bit_length() + 1))

    def _expired(self, step: int) -> Int64s:
        """Evict and return the ids that have not occurred for ``ttl_steps``, if a search for them is due."""
        ttl, period = self.settings.ttl_steps, self.settings.expiry_period
        if ttl is None or step // period == self._step // period:
            return np.empty(0, dtype=np.int64)
        seen = self._last_seen[: self.num_used]
        return self._remove(np.flatnonzero((seen >= 0) & (seen < step - ttl)))

    def _oldest(self, step: int) -> Int64s:
        """Evict and return the oldest ids of a full map, at most ``eviction_count``, but none of this step."""
        seen, count = self._last_seen, self.settings.eviction_count
        limit = min(np.partition(seen, count - 1)[count - 1], step)
        older = np.flatnonzero(seen < limit)
        if limit < step:
            older = np.append(older, np.flatnonzero(seen == limit)[: count - len(older)])
        return self._remove(older)

    def _remove(self, entries: Int64s) -> Int64s:
        # New ids get these entries in this order: longest unseen first, then the lowest.
        entries = entries[np.lexsort((entries, self._last_seen[entries]))]
        if len(entries):
            library().id_map_remove(self._described(), entries.ctypes.data, len(entries))
            num_free = int(self._numbers[FREE])
            self._free[num_free : num_free + len(entries)] = entries[::-1]
            self._numbers[FREE] += len(entries)
            self._numbers[COUNT] -= len(entries)
            self._last_seen[entries] = -1
        return self._ids[entries]

    def _make_slots(self, bits: int) -> None:
        """Rebuild the hash table with 2^bits slots and the present ids; at most half of the slots are ever used."""
        self._bits, self._mask, self._shift = bits, 2**bits - 1, 64 - bits
        self._slots = np.zeros(2 * 2**bits, dtype=np.int64)
        entries, _ = self.ids()
        library().id_map_put(self._described(), entries.ctypes.data, len(entries))

    def _described(self) -> Any:
        arrays = {
            "slots": self._slots, "ids_of": self._ids, "last_seen": self._last_seen, "free": self._free,
            "numbers": self._numbers, "current": self._current, "previous": self._previous,
        }  # fmt: skip
        capacity = self.settings.capacity
        return byref(
            IdMap(
                **{name: array.ctypes.data for name, array in arrays.items()}, mask=self._mask, shift=self._shift,
                capacity=capacity, admission_threshold=self.settings.admission_threshold,
                block_shift=self._block_shift, count_limit=capacity,
            )
        )  # fmt: skip


def _flat(ids: Int64s) -> Int64s:
    ids = np.ascontiguousarray(ids)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"ids must be int64 [n], not {ids.dtype} {list(ids.shape)}: hash strings to 64 bits first")
    return ids
