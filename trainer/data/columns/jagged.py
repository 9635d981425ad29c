"""Lists of different lengths as (values, offsets), and other array functions without a loop over rows. Torch-free."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Jagged(NamedTuple):
    """n lists: list i is ``values[offsets[i] : offsets[i + 1]]``; offsets are int64 [n + 1] and may begin above 0."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def take(self, rows: npt.NDArray[np.integer]) -> Jagged:
        """Return the lists at ``rows``, in that order, copied; a negative row is an empty list."""
        rows = np.asarray(rows)
        present = rows >= 0
        safe = np.where(present, rows, 0)
        if len(self.offsets) < 2:
            return Jagged(self.values[:0], np.zeros(len(rows) + 1, dtype=np.int64))
        starts = self.offsets[safe]
        lengths = np.where(present, self.offsets[safe + 1] - starts, 0)
        return gather_spans(self.values, starts, lengths)

    def part(self, start: int, stop: int) -> Jagged:
        """Return the lists ``start`` to ``stop`` (excluded), without a copy of their values."""
        first, last = self.offsets[start], self.offsets[stop]
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def last(self, length: int) -> Jagged:
        """Return the last ``length`` values of each list, or all values of a shorter list."""
        lengths = np.minimum(self.lengths, length)
        return gather_spans(self.values, self.offsets[1:] - lengths, lengths)


def gather_spans(values: npt.NDArray[Any], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Jagged:
    """Return the lists ``values[starts[i] : starts[i] + lengths[i]]``."""
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Jagged(values[index], offsets)


def sorted_unique(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the distinct values, ascending.

    Sorts, because np.unique hashes since NumPy 2.3, 42 times slower for a million int64.
    """
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
