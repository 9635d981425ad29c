"""A column looked up in a second file by key. Torch-free; the file is held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns import values
from trainer.data.columns.base import Column
from trainer.data.columns.ids import IdColumn, ListColumn, TextColumn
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.orders import Order, as_order, order_of
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import Codes, DistinctIds
from trainer.data.errors import DataError
from trainer.data.sources.key_matches import KeyMatches
from trainer.data.sources.source import Chunk, Source
from trainer.spec import Join


class JoinTable:
    """Lookup of the ids in a file's column ``join.column`` by the keys in its column ``join.on``.

    A key has one id (``take: last`` or ``first``) or a list of ids (``take: all``). ``ids`` computes ids from the
    column's values, such as the n-grams of a text; None: the values are the ids.

    Raises:
        DataError: the file or a column is missing, or a key is null or occurs twice.
    """

    def __init__(self, join: Join, uri: str, ids: IdColumn | None = None):
        ids = ids or (ListColumn if join.take == "all" else IdColumn)(join.column, "")
        self.source = Source(uri, ids=(join.on, join.column))
        self._timestamp = str(join.timestamp)
        self.source.require([join.on, join.column, *filter(None, (join.timestamp,))])
        self.takes_list = join.take == "all" or isinstance(ids, TextColumn)
        self.kind: Kind = ids.kind(self.source.column_type(join.column), f"{uri}, column '{join.column}'")
        self._key_kind: Kind = values.id_kind(self.source.column_type(join.on), f"{uri}, column '{join.on}'")
        if self.takes_list:
            ids.require_clear(self.source)
        keys, elements, lengths = [], [], []
        for chunk in self.source.stream([join.on, join.column]):
            keys.append(values.as_ids(chunk.column(join.on), self._key_kind, chunk.where(join.on)))
            found = ids.elements(chunk, split=self.takes_list or ids.is_list)
            elements.append(values.as_ids(found[0], self.kind, chunk.where(join.column)))
            lengths.append(found[1])
        if not keys:
            raise DataError("has no rows", where=uri, remedy="fill the file, or leave the join out")
        self._codes = Codes(_unique_keys(pa.concat_arrays(keys), f"{uri}, column '{join.on}'"))
        counts = np.concatenate(lengths)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._elements = pa.concat_arrays(elements)
        self._offsets = offsets
        if not self.takes_list:
            # One element per key: the last or the first; a key with an empty list has none.
            chosen = offsets[1:] - 1 if join.take == "last" else offsets[:-1]
            self._elements = self._elements.take(pa.array(np.where(counts > 0, chosen, -1), mask=counts == 0))

    @property
    def has_text_keys(self) -> bool:
        return self._key_kind == "string"

    @property
    def keys(self) -> pa.Array:
        """The file's keys, in the order of its rows."""
        return self._codes.ids

    @cached_property
    def order(self) -> Order:
        """The kind of the values in the file's column ``join.timestamp``: numbers or times."""
        return order_of(self.source, self._timestamp)

    @cached_property
    def times(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """The column ``timestamp`` of the join file as numbers, and a mask of missing times, by position."""
        found = [self.order.read(chunk.column(self._timestamp)) for chunk in self.source.stream([self._timestamp])]
        numbers, unreadable, other = (np.concatenate(part) for part in zip(*found, strict=True))
        return numbers, unreadable | other

    def require_times(self, positions: npt.NDArray[np.int64], purpose: str) -> None:
        """Check that the join file has a time at each of the positions.

        Raises:
            DataError: at the first position without a time.
        """
        bad = positions[self.times[1][positions]]
        start = 0
        for chunk in self.source.stream([self._timestamp]) if len(bad) else ():
            row = int(bad[0]) - start
            if row < len(chunk):
                one = Chunk(chunk.file, chunk.rows[row:], chunk.batch.slice(row))
                as_order(one, self._timestamp, self.order, purpose)
            start += len(chunk)

    @cached_property
    def _codes_of_text(self) -> Codes:
        return Codes(values.as_ids(self.keys, "string", self.source.uri))

    @cached_property
    def has_text(self) -> bool:
        """True if the values are text and only some of them are written as integers."""
        return self.kind == "string" and values.some_are_written_as_integers(self._elements)

    def add_to(self, distinct: DistinctIds) -> None:
        """Add the values to the ids of the feature's table."""
        distinct.add(values.as_ids(self._elements, distinct.kind, self.source.uri))

    def positions(self, keys: pa.Array, where: str) -> npt.NDArray[np.int64]:
        """Return the position in the join file of each key; -1 if the file lacks it.

        Text is compared with integers as they are written.
        """
        if self._key_kind == "int" and values.is_text(keys.type):
            return self._codes_of_text.encode(values.as_ids(keys, "string", where))
        return self._codes.encode(values.as_ids(keys, self._key_kind, where))

    def ids(self, positions: npt.NDArray[np.int64]) -> tuple[pa.Array, npt.NDArray[np.int64] | None]:
        """Return the raw ids at these positions of the join file; position -1 has none.

        Returns:
            A pair: an id or null for each position, and None; or for lists, the ids of all lists, and the lists'
            lengths.
        """
        if not self.takes_list:
            return self._elements.take(pa.array(positions, mask=positions < 0)), None
        indices = Jagged(np.arange(len(self._elements)), self._offsets).take(positions)
        return self._elements.take(pa.array(indices.values)), indices.lengths

    def coded(self, codes: Codes, kind: Kind) -> npt.NDArray[np.int32] | Jagged:
        """Return the code, or list of codes, of each position in the join file; the last entry is for position -1."""
        element_codes = codes.encode(values.as_ids(self._elements, kind, self.source.uri)).astype(np.int32)
        if self.takes_list:
            return Jagged(element_codes, self._offsets)
        return np.append(element_codes, np.int32(-1))


@dataclass(frozen=True)
class Joined(Column):
    """Column with the position of each row's key in a joined file, int32 [rows]; -1 if the file lacks the key."""

    name: str
    table: JoinTable
    column: str

    dtype = np.dtype(np.int32)

    def read(self, chunk: Chunk) -> npt.NDArray[np.int64]:
        return self.table.positions(chunk.column(self.column), chunk.where(self.column))

    def matches(self, chunk: Chunk, found: npt.NDArray[Any]) -> KeyMatches:
        return KeyMatches.of(chunk.column(self.column), found)


def join_name(join: str) -> str:
    """Return the name of a join among the columns of a plan; no feature can have this name."""
    return f"join of {join}"


def _unique_keys(keys: pa.Array, where: str) -> pa.Array:
    if keys.null_count:
        row = int(np.flatnonzero(keys.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError("a join key is null", where=f"{where}, row {row}", remedy="fill it in, or remove the row")
    counts = pc.value_counts(keys)
    if len(counts) < len(keys):
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        raise DataError(
            f"{len(repeated)} join keys occur more than once, the first is {repeated[0]}",
            where=where,
            remedy="keep one row per key",
        )
    return keys
