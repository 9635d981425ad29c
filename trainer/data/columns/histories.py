"""Histories: the items before each row's time, for rows of the dataset and for other rows to score. Torch-free.

Sorting holds three integers per row in memory.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.jagged import Jagged, gather_spans
from trainer.data.columns.orders import as_order, order_of
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import Codes, DistinctIds
from trainer.data.sources.source import Source

Int64s = npt.NDArray[np.int64]


class PreviousValues:
    """Histories of rows: the last ``length`` values of rows with the same ``by`` and a smaller ``order``, oldest first.

    Rows of equal order are not in each other's history. Rows whose ``by`` is missing (-1) have no history.
    """

    def __init__(self, by: npt.NDArray[Any], order: npt.NDArray[Any], previous: npt.NDArray[np.int32], length: int):
        self._length, self._perm = length, np.lexsort((np.arange(len(by)), order, by))
        self._by, self._order, self._values = (np.asarray(one)[self._perm] for one in (by, order, previous))

    def rows(self, start: int, stop: int) -> Jagged:
        """Return the histories of rows [start, stop)."""
        starts, lengths = self._spans
        return gather_spans(self._values, starts[start:stop], lengths[start:stop])

    def before(self, by: npt.NDArray[np.integer], order: npt.NDArray[Any] | None) -> Jagged:
        """Return the histories of rows with these ``by`` and ``order``; without ``order``, of the latest values."""
        times, keys = self._times_and_keys
        asked = by.astype(np.int64) * (len(times) + 1)
        first = np.searchsorted(keys, asked)
        end = np.searchsorted(keys, asked + (len(times) if order is None else np.searchsorted(times, order)))
        begin = np.where(by >= 0, np.maximum(first, end - self._length), end)
        return gather_spans(self._values, begin, end - begin)

    @cached_property
    def _spans(self) -> tuple[Int64s, Int64s]:
        """Start and length of the history of each row among the sorted values."""
        by, order, count = self._by, self._order, len(self._by)
        new_group = np.r_[True, by[1:] != by[:-1]] if count else np.empty(0, dtype=bool)
        new_time = new_group | np.r_[True, order[1:] != order[:-1]] if count else new_group
        position = np.arange(count)
        group_start = np.maximum.accumulate(np.where(new_group, position, 0))
        end = np.maximum.accumulate(np.where(new_time, position, 0))
        begin = np.maximum(group_start, end - self._length)
        begin[by < 0] = end[by < 0]
        starts, lengths = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        starts[self._perm], lengths[self._perm] = begin, end - begin
        return starts, lengths

    @cached_property
    def _times_and_keys(self) -> tuple[npt.NDArray[Any], Int64s]:
        """Distinct orders, and one ascending key for ``by`` and ``order`` of each row."""
        times = np.unique(self._order)
        return times, self._by.astype(np.int64) * (len(times) + 1) + np.searchsorted(times, self._order)


class HistoryLookup:
    """For each id in ``by``, the values of ``previous`` in the order of ``order``, over all rows of a dataset.

    ``rows_of`` returns, for a chunk, the table row of each id in the column ``previous``.
    """

    def __init__(self, source: Source, by: str, order: str, previous: str, length: int, rows_of: Any):
        self._kind: Kind = values.id_kind(source.column_type(by), f"{source.uri}, column '{by}'")
        distinct = DistinctIds(self._kind)
        for chunk in source.stream([by]):
            distinct.add(values.as_ids(chunk.column(by), self._kind, chunk.where(by)))
        self.order = order_of(source, order)
        self._codes = Codes(distinct.sorted())
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        for chunk in source.stream([by, order, previous]):
            of = self._codes.encode(values.as_ids(chunk.column(by), self._kind, chunk.where(by)))
            parts.append((of.astype(np.int32), as_order(chunk, order, self.order), rows_of(chunk).astype(np.int32)))
        of, times, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
        self._values = PreviousValues(of, times, rows, length)

    def before(self, by: pa.Array, times: npt.NDArray[Any] | None, where: str) -> Jagged:
        """Return the histories of rows with these ids of ``by`` and these times.

        Without times (None) a history has the user's latest values. A history is empty if ``by`` is missing or unknown.
        """
        return self._values.before(self._codes.encode(values.as_ids(by, self._kind, where)), times)
