"""The id map (:mod:`embeddings.dynamic.id_map`) in plain Python, for tests and to read; torch-free."""

from __future__ import annotations

import numpy as np

from embeddings.dynamic.settings import IdMapSettings

_MASK = 2**64 - 1


class ReferenceIds:
    """Entries 0 .. capacity - 1 of ids, one dictionary; see :class:`embeddings.dynamic.id_map.DynamicIdMap`."""

    def __init__(self, settings: IdMapSettings) -> None:
        self.settings = settings
        self.entries: dict[int, int] = {}
        self.last_seen: dict[int, int] = {}
        self.free: list[int] = []
        self.high = self.step = self.counted = self.refused = 0
        self.current = np.zeros(64 * settings.num_blocks, dtype=np.int64)
        self.previous = np.zeros_like(self.current)

    def find(self, ids: list[int]) -> list[int]:
        """Return the entry of each id, -1 for ids without one."""
        return [self.entries.get(raw, -1) for raw in ids]

    def assign(self, ids: list[int], step: int) -> tuple[list[int], list[int], list[int]]:
        """Return (entry of each id, -1 without one; admitted ids; evicted ids), in the order in which it happened."""
        settings, came, went = self.settings, [], []  # type: ignore[var-annotated]
        period = settings.expiry_period
        if settings.ttl_steps is not None and step // period != self.step // period:
            went += self._remove([raw for raw, seen in self.last_seen.items() if seen < step - settings.ttl_steps])
        self.step = step
        for raw in ids:
            if raw in self.entries:
                self.last_seen[raw] = step
        entries = self.find(ids)
        for i, raw in enumerate(ids):
            if entries[i] >= 0:
                continue
            if raw not in self.entries and self._is_admitted(raw):
                if not self.free and self.high == settings.capacity and settings.eviction_policy == "oldest":
                    old = sorted((seen, self.entries[raw], raw) for raw, seen in self.last_seen.items() if seen < step)
                    went += self._remove([raw for _, _, raw in old[: settings.eviction_count]])
                if self.free or self.high < settings.capacity:
                    self.high += not self.free
                    self.entries[raw] = self.free.pop() if self.free else self.high - 1
                    self.last_seen[raw] = step
                    came.append(raw)
                else:
                    self.refused += 1
            entries[i] = self.entries.get(raw, -1)
        return entries, came, went

    def _remove(self, ids: list[int]) -> list[int]:
        # The oldest, and of those the lowest, is the first that is given to somebody else.
        ids = sorted(ids, key=lambda raw: (self.last_seen[raw], self.entries[raw]))
        self.free += [self.entries[raw] for raw in reversed(ids)]
        for raw in ids:
            del self.entries[raw], self.last_seen[raw]
        return ids

    def _is_admitted(self, raw: int) -> bool:
        if self.settings.admission_threshold == 1:
            return True
        if self.counted >= self.settings.capacity:
            self.previous, self.current = self.current, np.zeros_like(self.current)
            self.counted = 0
        self.counted += 1
        word = _mixed((_mixed(raw & _MASK) + 0x9E3779B97F4A7C15) & _MASK)
        block = 64 * (word * self.settings.num_blocks >> 64)
        places = [block + (word >> shift) % 64 for shift in (0, 6, 12, 18)]
        least = min(self.current[places])
        if least < 255:
            for counter in places:
                if self.current[counter] == least:
                    self.current[counter] += 1
        return bool(min(self.current[places] + self.previous[places]) >= self.settings.admission_threshold)


def _mixed(word: int) -> int:
    """Return ``word`` after splitmix64's finalizer."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31
