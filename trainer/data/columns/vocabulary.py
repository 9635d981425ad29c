"""Distinct raw ids of a table, and their codes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.values import Kind

_LOOKUP_SPAN_FACTOR = 8
_LEAST_MERGE = 1 << 18

Int32s = npt.NDArray[np.int32]


def id_type(kind: Kind) -> pa.DataType:
    """Return the type of a table's raw ids."""
    return pa.int64() if kind == "int" else pa.large_string()


def encoded(ids: pa.Array) -> tuple[pa.Array, Int32s]:
    """Return (distinct ids in order of first appearance, int32 place of each id among them, -1 for null)."""
    dictionary_encoded = ids.dictionary_encode()
    places = dictionary_encoded.indices
    if places.null_count:
        places = pc.fill_null(places, -1)
    return dictionary_encoded.dictionary, places.to_numpy(zero_copy_only=False)


class DistinctIds:
    """The distinct ids of a stream; memory follows the number of distinct ids, not of rows.

    Args:
        kind: integers or strings.
        take_places: called with arrays that, in turn, hold the position of every added id among the distinct ids, which
            are in order of first appearance.
        distinct: distinct ids of an earlier stream that this stream continues, in order of first appearance; None:
            there is no earlier stream.
    """

    def __init__(
        self,
        kind: Kind,
        take_places: Callable[[Int32s], object] = lambda places: None,
        distinct: pa.Array | None = None,
    ):
        self.kind = kind
        self._take_places = take_places
        self._distinct = pa.array([], id_type(kind)) if distinct is None else distinct
        self._parts: list[pa.Array] = []
        self._pending = self._num_appended = 0

    @property
    def num_bytes(self) -> int:
        """Size of the ids in memory, in bytes."""
        return int(self._distinct.nbytes + sum(part.nbytes for part in self._parts))

    def add(self, ids: pa.Array) -> None:
        """Add ids as :func:`trainer.data.columns.values.as_ids` returns them; nulls are ignored."""
        self.append(pc.unique(ids.drop_null() if ids.null_count else ids))

    def append(self, ids: pa.Array) -> int:
        """Add ids without nulls, few of which repeat; return the number of ids added before, including repeats."""
        start = self._num_appended
        self._parts.append(ids)
        self._num_appended += len(ids)
        self._pending += len(ids)
        # Merge once the new parts outgrow the merged ids: each id is merged a logarithmic number of times.
        if self._pending > max(len(self._distinct), _LEAST_MERGE):
            self.settled()
        return start

    def sorted(self) -> pa.Array:
        """Return all ids in ascending order (strings by UTF-8 bytes), independent of how the stream was cut."""
        return self.ranked()[0]

    def ranked(self) -> tuple[pa.Array, Int32s]:
        """Return (:meth:`sorted`, the position in it of each id in order of first appearance)."""
        self.settled()
        order = pc.array_sort_indices(self._distinct)
        ranks = np.empty(len(order), dtype=np.int32)
        ranks[order.to_numpy(zero_copy_only=False)] = np.arange(len(order), dtype=np.int32)
        return self._distinct.take(order), ranks

    def settled(self) -> pa.Array:
        """Pass the positions of all added ids on; return the distinct ids in order of first appearance."""
        if not self._parts:
            return self._distinct
        # The merged ids come first, so their positions do not change.
        before = len(self._distinct)
        self._distinct, places = encoded(pa.concat_arrays([self._distinct, *self._parts]))
        self._take_places(places[before:])
        self._parts, self._pending = [], 0
        return self._distinct


class Codes:
    """Map from ids to their positions in ``ids`` (distinct, without nulls, any order)."""

    def __init__(self, ids: pa.Array):
        self.ids = ids

    @cached_property
    def _positions_of_numbers(self) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
        """Return the function from integers to their positions, -1 for those that are not in ``ids``."""
        numbers = self.ids.to_numpy(zero_copy_only=False)
        first = int(numbers.min())
        span = int(numbers.max()) - first + 1
        if span <= _LOOKUP_SPAN_FACTOR * len(numbers) + 1024:
            lookup = np.full(span, -1, dtype=np.int64)
            lookup[numbers - first] = np.arange(len(numbers))

            def looked_up(asked: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
                # Compare before subtracting: the difference of two int64 may overflow.
                inside = (asked >= first) & (asked <= first + span - 1)
                return np.where(inside, lookup[np.where(inside, asked, first) - first], -1)

            return looked_up
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]

        def searched(asked: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            position = np.minimum(np.searchsorted(ascending, asked), len(ascending) - 1)
            return np.where(ascending[position] == asked, order[position], -1)

        return searched

    def encode(self, ids: pa.Array) -> npt.NDArray[np.int64]:
        """Return int64 positions; -1 for null and for ids that are not in ``ids``."""
        if len(self.ids) == 0 or len(ids) == 0:
            return np.full(len(ids), -1, dtype=np.int64)
        if not pa.types.is_int64(self.ids.type):
            indices = pc.index_in(ids, value_set=self.ids)
            return pc.fill_null(indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        if ids.null_count == 0:
            return self._positions_of_numbers(ids.to_numpy(zero_copy_only=False))
        positions = self._positions_of_numbers(pc.fill_null(ids, 0).to_numpy(zero_copy_only=False))
        return np.where(ids.is_valid().to_numpy(zero_copy_only=False), positions, -1)
