"""Histories for rows that were not trained on, as training derives them for its own rows.

Torch-free; holds three integers for each row of the dataset in memory.
"""

from __future__ import annotations

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


class HistoryLookup:
    """The values of ``previous`` by ``by`` in the order of ``order``, over all rows of a dataset.

    For a row with ``by`` b at time t these are the last ``length`` values of b before t, oldest first: what
    :class:`trainer.data.prepare.history.PreviousValues` gives to each row of the dataset itself.

    Args:
        rows_of: what each raw id of ``previous`` is to the model: its table row.
    """

    def __init__(self, source: Source, by: str, order: str, previous: str, length: int, rows_of: Any):
        kind = values.id_kind(source.column_type(by), f"{source.uri}, column '{by}'")
        distinct = DistinctIds(kind)
        for chunk in source.stream([by]):
            distinct.add(values.as_ids(chunk.column(by), kind, chunk.where(by)))
        self.order = order_of(source, order)
        self._kind: Kind = kind
        self._codes = Codes(distinct.sorted())
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        for chunk in source.stream([by, order, previous]):
            of = self._codes.encode(values.as_ids(chunk.column(by), kind, chunk.where(by)))
            times = as_order(chunk, order, self.order)
            parts.append((of.astype(np.int32), times, rows_of(chunk).astype(np.int32)))
        of, times, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
        sequence = np.lexsort((times, of))  # stable: equal times stay in the order of rows
        # One key for (by, time), so that one binary search finds where a row stands.
        self._times = np.unique(times)
        keys = self._keys(of[sequence], np.searchsorted(self._times, times[sequence]))
        self._keys_in_order, self._rows, self._length = keys, rows[sequence], length

    def _keys(self, of: npt.NDArray[np.integer], rank: npt.NDArray[np.integer]) -> Int64s:
        return of.astype(np.int64) * (len(self._times) + 1) + rank

    def before(self, by: pa.Array, times: npt.NDArray[Any] | None, where: str) -> Jagged:
        """Return the histories of rows with these ids of ``by`` and these times.

        Without times (None) a history is all that there is. A row whose ``by`` is missing or unknown has an empty one.
        """
        of = self._codes.encode(values.as_ids(by, self._kind, where))
        rank = np.full(len(of), len(self._times)) if times is None else np.searchsorted(self._times, times)
        known = np.maximum(of, 0)
        first = np.searchsorted(self._keys_in_order, self._keys(known, np.zeros(len(known), dtype=np.int64)))
        end = np.searchsorted(self._keys_in_order, self._keys(known, rank))
        start = np.where(of >= 0, np.maximum(first, end - self._length), end)
        return gather_spans(self._rows, start, end - start)
