"""Distinct raw ids of a table, and their codes. Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.jagged import sorted_unique
from trainer.data.columns.values import Kind

_LOOKUP_SPAN_FACTOR = 8


class DistinctIds:
    """The distinct ids of a stream; memory follows the number of distinct ids, not of rows."""

    def __init__(self, kind: Kind):
        self.kind = kind
        self._parts: list[pa.Array] = []
        self._pending = 0
        self._merged = 0

    def add(self, ids: pa.Array) -> None:
        """Add ids as :func:`trainer.data.columns.values.as_ids` gives them; nulls are passed over."""
        part = self._unique(ids.drop_null() if ids.null_count else ids)
        self._parts.append(part)
        self._pending += len(part)
        # Merge once the new parts outgrow what is merged: each id is merged a logarithmic number of times.
        if self._pending > max(self._merged, 1 << 20):
            self._merge()

    def sorted(self) -> pa.Array:
        """Return all ids in ascending order (strings by UTF-8 bytes), independent of how the stream was cut."""
        self._merge()
        ids = self._parts[0]
        return ids if self.kind == "int" else ids.take(pc.array_sort_indices(ids))

    def _merge(self) -> None:
        type_ = pa.int64() if self.kind == "int" else pa.large_string()
        self._parts = [self._unique(pa.concat_arrays([pa.array([], type_), *self._parts]))]
        self._merged, self._pending = len(self._parts[0]), 0

    def _unique(self, ids: pa.Array) -> pa.Array:
        if self.kind == "int":
            return pa.array(sorted_unique(ids.to_numpy(zero_copy_only=False)), type=pa.int64())
        return pc.unique(ids)


class Codes:
    """Map from ids to their positions in ``ids`` (distinct, without nulls, any order)."""

    def __init__(self, ids: pa.Array):
        self.ids = ids
        self._lookup: npt.NDArray[np.int64] | None = None
        if pa.types.is_int64(ids.type) and len(ids):
            self._numbers = ids.to_numpy(zero_copy_only=False)
            self._first = int(self._numbers.min())
            span = int(self._numbers.max()) - self._first + 1
            if span <= _LOOKUP_SPAN_FACTOR * len(ids) + 1024:
                self._lookup = np.full(span, -1, dtype=np.int64)
                self._lookup[self._numbers - self._first] = np.arange(len(ids))
            else:
                self._order = np.argsort(self._numbers, kind="stable")
                self._sorted = self._numbers[self._order]

    def encode(self, ids: pa.Array) -> npt.NDArray[np.int64]:
        """Return int64 positions; -1 for null and for ids that are not in ``ids``."""
        if len(self.ids) == 0:
            return np.full(len(ids), -1, dtype=np.int64)
        if not pa.types.is_int64(self.ids.type):
            indices = pc.index_in(ids, value_set=self.ids)
            return pc.fill_null(indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        valid = ids.is_valid().to_numpy(zero_copy_only=False)
        numbers = (pc.fill_null(ids, 0) if ids.null_count else ids).to_numpy(zero_copy_only=False)
        if self._lookup is not None:
            # Compare before subtracting: the difference of two int64 may overflow.
            inside = (numbers >= self._first) & (numbers <= self._first + len(self._lookup) - 1)
            codes = self._lookup[np.where(inside, numbers, self._first) - self._first]
            return np.where(inside & valid, codes, -1)
        position = np.minimum(np.searchsorted(self._sorted, numbers), len(self._sorted) - 1)
        hit = (self._sorted[position] == numbers) & valid
        return np.where(hit, self._order[position], -1)
