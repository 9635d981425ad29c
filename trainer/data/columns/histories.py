"""The items that came before each row. Torch-free; holds three integers per row in memory while it sorts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.jagged import Jagged, gather_spans


class PreviousValues:
    """For each row: the last ``length`` values of the same ``by`` with a strictly smaller ``order``, oldest first.

    Rows of equal order do not see each other (neither came first). Rows without a ``by`` (-1) have no history.
    """

    def __init__(self, by: npt.NDArray[Any], order: npt.NDArray[Any], previous: npt.NDArray[np.int32], length: int):
        count = len(by)
        perm = np.lexsort((np.arange(count), order, by))
        sorted_by, sorted_order = np.asarray(by)[perm], np.asarray(order)[perm]
        new_group = np.r_[True, sorted_by[1:] != sorted_by[:-1]] if count else np.empty(0, dtype=bool)
        new_time = new_group | np.r_[True, sorted_order[1:] != sorted_order[:-1]] if count else new_group
        position = np.arange(count)
        group_start = np.maximum.accumulate(np.where(new_group, position, 0))
        end = np.maximum.accumulate(np.where(new_time, position, 0))
        begin = np.maximum(group_start, end - length)
        begin[sorted_by < 0] = end[sorted_by < 0]
        self._length, self._by, self._order = length, sorted_by, sorted_order
        self._values = np.asarray(previous)[perm]
        self._starts = np.empty(count, dtype=np.int64)
        self._starts[perm] = begin
        self._lengths = np.empty(count, dtype=np.int64)
        self._lengths[perm] = end - begin

    def rows(self, start: int, stop: int) -> Jagged:
        """Return the histories of rows [start, stop)."""
        return gather_spans(self._values, self._starts[start:stop], self._lengths[start:stop])

    def before(self, by: npt.NDArray[np.integer], order: npt.NDArray[Any]) -> Jagged:
        """Return the histories that rows with these ``by`` and ``order`` would have."""
        times, keys = self._times_and_keys
        asked = by.astype(np.int64) * (len(times) + 1)
        first, end = np.searchsorted(keys, asked), np.searchsorted(keys, asked + np.searchsorted(times, order))
        begin = np.where(by >= 0, np.maximum(first, end - self._length), end)
        return gather_spans(self._values, begin, end - begin)

    @cached_property
    def _times_and_keys(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Distinct orders, and one ascending key for ``by`` and ``order`` of each row."""
        times = np.unique(self._order)
        return times, self._by.astype(np.int64) * (len(times) + 1) + np.searchsorted(times, self._order)
