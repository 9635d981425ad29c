"""Encoding of rows for a trained model: from raw columns to rows of its embedding tables. Torch-free.

An id that the vocabulary lacks, and a missing id, become table row 1, the unknown id. In the model's own evaluation,
ids of held-out rows that no training row had became row 1 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns import text_lists, values
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, UNKNOWN_ROW
from trainer.data.columns.hashing import Int64s, id_keys
from trainer.data.columns.histories import HistoryLookup
from trainer.data.columns.ids import id_column
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import Numeric
from trainer.data.columns.orders import as_order, order_in
from trainer.data.columns.values import Kind
from trainer.data.columns.vectors import Vector, arranged, columns_of, require_lists
from trainer.data.columns.vocabulary import Codes
from trainer.data.columns.weights import as_factors, require_weighted
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import VALUE
from trainer.data.sources.item_table import ITEM_TABLE, item_file
from trainer.data.sources.join import Joined, JoinTable, join_name
from trainer.data.sources.key_matches import LEAST_FOUND, KeyMatches, likely_reason, shown
from trainer.data.sources.source import Chunk, Source, beside
from trainer.spec import DatasetSpec, Feature

_MOST_LOOKED_AT = 100
"""Most unknown ids of a chunk to check: each may be a list that was read as one id."""


@dataclass
class EncodedRows:
    """Some rows as a model reads them.

    Attributes:
        rows: by id feature, the rows of its embedding table: int64 [b], or lists of int64.
        unknown: feature -> the number of ids that the vocabulary lacks.
        missing: feature -> the number of null ids or missing values.
        matches: counts of found and unknown ids by feature, and of found and unknown keys by :func:`join_name`.
        weights: by list feature with weights, a factor for each element of its lists.
        dense: float32 [b, n], numeric features and vectors (trainer.data.columns.vectors); None if there are none.
    """

    num_rows: int
    rows: dict[str, Int64s | Jagged] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    matches: dict[str, KeyMatches] = field(default_factory=dict)
    weights: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    dense: npt.NDArray[np.float32] | None = None

    def part(self, start: int, stop: int) -> EncodedRows:
        """Return the rows ``start`` to ``stop`` (excluded), without the counts."""

        rows, weights = {}, {}
        for name, column in self.rows.items():
            rows[name] = column.part(start, stop) if isinstance(column, Jagged) else column[start:stop]
            if name in self.weights:
                assert isinstance(column, Jagged)
                weights[name] = Jagged(self.weights[name], column.offsets).part(start, stop).values
        dense = None if self.dense is None else self.dense[start:stop]
        return EncodedRows(stop - start, rows, weights=weights, dense=dense)

    def replaced(self, **rows: Int64s | Jagged) -> EncodedRows:
        """Return a copy in which these features have the given table rows."""
        return replace(self, rows=self.rows | rows)


class RowEncoder:
    """Encoder of rows that have the given features.

    If the rows have a column named like a derived history, the history is read from that column: lists, oldest first.
    Otherwise it is looked up in the dataset's rows of the same user before the row's own time. Rows without a column of
    times get the user's latest history.

    Args:
        dataset: the dataset that the model was trained on.
        features: the id features to encode, keyed by name.
        numeric: numeric features with the statistics of training; features of the item table come last.
        vectors: the vectors that the model reads; vectors of the item table come last.
        vocabularies: table -> its raw ids, or uint64 hashes of string ids; entry i belongs to table row i + 2.
        joins: feature (ITEM_TABLE for the item table) -> uri of the file to read instead of the dataset's.
        history_source: opens the dataset's rows, to look up histories; None: histories must be columns of the rows.
    """

    def __init__(
        self,
        dataset: DatasetSpec,
        features: Mapping[str, Feature],
        vocabularies: Mapping[str, pa.Array],
        *,
        numeric: Sequence[Numeric] = (),
        vectors: Sequence[Vector] = (),
        joins: Mapping[str, str] | None = None,
        history_source: Callable[[], Source] | None = None,
    ):
        self._dataset = dataset
        self._features = dict(features)
        num_of_rows = len(numeric) - dataset.num_item_numbers
        self._numeric, self._item_numeric = tuple(numeric[:num_of_rows]), tuple(numeric[num_of_rows:])
        self._vectors = tuple(vectors)
        of_items = [one for one in vectors if one.of_item]
        uri = (joins or {}).get(ITEM_TABLE)
        self._items = item_file(dataset, self._item_numeric, of_items, uri) if self._item_numeric or of_items else None
        self._codes = {table: Codes(ids) for table, ids in vocabularies.items()}
        self._columns = {
            name: id_column(feature, self._column(name, feature), feature.shares or name)
            for name, feature in self._features.items()
        }
        self._joins = {
            # Drop the timestamp: only training rows are checked against it, and an export's copy of the file lacks it.
            name: JoinTable(
                join.model_copy(update={"timestamp": None}), uri, replace(self._columns[name], column=join.column)
            )
            for name, feature in self._features.items()
            if (join := feature.join) is not None
            for uri in [(joins or {}).get(name) or beside(join.uri, dataset.uri)]
        }
        self._open_history_source = history_source
        self._histories: dict[str, HistoryLookup] = {}

    @property
    def dense_columns(self) -> dict[str, slice]:
        """Range of the columns of each numeric feature and vector in :attr:`EncodedRows.dense`."""
        of_rows, of_items = ([one.name for one in numeric] for numeric in (self._numeric, self._item_numeric))
        return columns_of(of_rows, of_items, self._vectors)

    @property
    def vector_names(self) -> list[str]:
        """Names of the vectors."""
        return [one.name for one in self._vectors]

    @property
    def id_columns(self) -> frozenset[str]:
        """Names of the rows' columns that ids are read from."""
        return self._dataset.id_columns

    @property
    def text_columns(self) -> frozenset[str]:
        """Names of the rows' columns to read as text, even if a file without declared types has only digits."""
        features = {**self._dataset.features, **self._features}
        found = {self._column(name, features[name]) for name, join in self._joins.items() if join.has_text_keys}
        for name, feature in features.items():
            table = feature.shares or name
            ids = id_column(feature, self._column(name, feature), table)
            if feature.join is None and ids.makes_ids:
                found |= {ids.column} if ids.holds_text else set()
            elif feature.join is None and table in self._codes:
                # A join's key is read like the feature of the same column.
                change = found.discard if self._kind(table) == "int" else found.add
                change(ids.column)
        return frozenset(found)

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """Return the names of the columns to read from rows that have the columns ``there``.

        ``where`` is the rows' origin, for errors.

        Raises:
            DataError: a column is missing.
        """
        columns = [feature.column for feature in self._numeric]
        columns += [one.column for one in self._vectors if not one.of_item]
        if self._items is not None:
            columns.append(self._dataset.column_of("item"))
        columns += [feature.weights for feature in self._features.values() if feature.weights is not None]
        for name, feature in self._features.items():
            if feature.derive is not None and name in there:
                columns.append(name)
            elif feature.derive is not None:
                columns += self._history_columns(name, feature, there, where)
            else:
                columns.append(self._column(name, feature))
        missing = sorted(set(columns) - set(there))
        if missing:
            raise DataError(
                f"no column {', '.join(repr(column) for column in missing)} (there are {', '.join(sorted(there))})",
                where=where,
                remedy="the model reads it: add it to the rows",
            )
        return list(dict.fromkeys(columns))

    def encode(self, chunk: Chunk) -> EncodedRows:
        """Encode rows, which must have the columns that :meth:`columns` returned.

        Raises:
            DataError: ids or other values of a column have a type that cannot be read, or an id is missing that must
                not be.
        """
        encoded = EncodedRows(len(chunk))
        if self._numeric or self._item_numeric or self._vectors:
            encoded.dense = self._dense(chunk, encoded)
        for name, feature in self._features.items():
            if feature.missing == "error":
                values.require_ids(chunk, self._column(name, feature))
            ids, lengths = self._ids(name, feature, chunk, encoded)
            if feature.weights is not None:
                weighted = require_weighted(chunk, self._columns[name])
                ids, lengths = weighted.elements, weighted.lengths
                offsets = np.append(0, np.cumsum(lengths))
                encoded.weights[name] = as_factors(Jagged(weighted.weights, offsets), feature.pooling)
            if ids is None:
                assert isinstance(lengths, Jagged)
                encoded.rows[name] = lengths
                encoded.unknown[name] = int((lengths.values == UNKNOWN_ROW).sum())
                continue
            assert not isinstance(lengths, Jagged)
            rows = self._encode(feature.shares or name, ids, f"{chunk.file.path}, feature '{name}'")
            if feature.type == "id_list" and feature.join is None and lengths is not None and values.is_text(ids.type):
                self._require_clear(name, feature, chunk, ids.filter(pa.array(rows == UNKNOWN_ROW)))
            matches = KeyMatches.of(ids, np.where(rows == UNKNOWN_ROW, -1, rows))
            encoded.matches[name] = matches
            encoded.missing[name] = len(ids) - matches.num_keys
            encoded.unknown[name] = matches.num_keys - matches.num_found
            encoded.rows[name] = rows if lengths is None else Jagged(rows, np.append(0, np.cumsum(lengths)))
        return encoded

    def warnings(self, matches: Mapping[str, KeyMatches]) -> list[str]:
        """Return a warning for each feature and join if the model knows none, or nearly none, of its ids."""
        warnings: list[str] = []
        for name, found in matches.items():
            if not found.exceeds(max(1.0 - LEAST_FOUND, self._dataset.max_unmatched)):
                continue
            known = self._known(name)
            text = f"warning: {name}: {found.num_found:,} of {found.num_keys:,} ids are known; the rows have "
            text += shown(found.unknown)
            if not pa.types.is_uint64(known.type):
                reason = likely_reason(found.unknown, known)
                text += f", known are {shown(known)}" + ("" if reason is None else f": {reason}")
            warnings.append(text)
        return warnings

    def _known(self, name: str) -> pa.Array:
        """Return the known ids in which the ids of a feature or a join are looked up."""
        if name in self._features:
            return self._codes[self._features[name].shares or name].ids
        if name == ITEM_TABLE:
            assert self._items is not None
            return self._items.ids
        return next(join.keys for feature, join in self._joins.items() if join_name(feature) == name)

    def _dense(self, chunk: Chunk, encoded: EncodedRows) -> npt.NDArray[np.float32]:
        """Return the numbers and vectors of rows, float32 [b, n]; count missing values and items in ``encoded``."""
        positions = np.empty(0, dtype=np.int64)
        if self._items is not None:
            items = Joined(ITEM_TABLE, self._items.lookup, self._dataset.column_of("item"))
            positions = items.read(chunk)
            encoded.matches[ITEM_TABLE] = items.matches(chunk, positions)

        of_items = {one.name for one in self._item_numeric} | {one.name for one in self._vectors if one.of_item}
        for vector in self._vectors:
            if not vector.of_item:
                require_lists(chunk.column(vector.column).type, vector, chunk.where(vector.column))
        found: dict[str, npt.NDArray[np.float32]] = {}
        for one in (*self._numeric, *self._item_numeric, *self._vectors):
            if one.name in of_items:
                assert self._items is not None
                read = self._items.values_at(positions, one.name)
            else:
                read = one.read(chunk)
            is_missing = np.isnan(read) if read.ndim == 1 else ~read.any(axis=1)
            if is_missing.any():
                encoded.missing[one.name] = int(is_missing.sum())
            found[one.name] = one.apply(read)
        none = np.empty((len(chunk), 0), dtype=VALUE)
        of_rows, of_table = (
            np.stack([found[one.name] for one in numeric], axis=1) if numeric else none
            for numeric in (self._numeric, self._item_numeric)
        )
        return arranged(of_rows, of_table, self._vectors, found)

    def _encode(self, table: str, ids: pa.Array, where: str) -> Int64s:
        """Return the table rows of raw ids, int64; null and unknown ids have row 1."""
        codes = self._codes[table]
        known = values.as_ids(ids, self._kind(table), where)
        indices = codes.encode(_hashed(known) if pa.types.is_uint64(codes.ids.type) else known)
        return np.where(indices >= 0, indices + NUM_SPECIAL_ROWS, UNKNOWN_ROW)

    def _require_clear(self, name: str, feature: Feature, chunk: Chunk, unknown: pa.Array) -> None:
        """Check that none of a list's unknown ids is a text of several known ids with a separator other than a pipe."""
        for text in text_lists.unclear(unknown.unique())[:_MOST_LOOKED_AT]:
            parts = pa.array(text_lists.parts(text))
            if (self._encode(feature.shares or name, parts, "") != UNKNOWN_ROW).all():
                what = f"{text[:60]!r} is not an id that the model knows, but a list of ids that it knows"
                raise DataError(what, where=chunk.where(self._column(name, feature)), remedy=text_lists.REMEDY)

    def _kind(self, table: str) -> Kind:
        return "int" if pa.types.is_int64(self._codes[table].ids.type) else "string"

    def _column(self, name: str, feature: Feature) -> str:
        if feature.join is not None:
            return self._dataset.column_of(feature.join.on)
        return feature.column or name

    def _ids(
        self, name: str, feature: Feature, chunk: Chunk, encoded: EncodedRows
    ) -> tuple[pa.Array, npt.NDArray[np.int64] | None] | tuple[None, Jagged]:
        """Return (raw ids, list lengths or None) of a feature, or (None, table rows) of a looked-up history."""
        if feature.derive is not None:
            if name not in chunk.batch.schema.names:
                return None, self._history(name, feature, chunk)
            elements, lengths = values.as_lists(chunk, name)
            indices = Jagged(np.arange(len(elements)), np.append(0, np.cumsum(lengths))).last(feature.derive.length)
            return elements.take(pa.array(indices.values)), indices.lengths
        if feature.join is not None:
            joined = Joined(join_name(name), self._joins[name], self._column(name, feature))
            positions = joined.read(chunk)
            encoded.matches[joined.name] = joined.matches(chunk, positions)
            ids, counts = joined.table.ids(positions)
            if feature.type == "id_list" and counts is None:
                # Single ids in a list feature: an id becomes a list of one, null an empty list.
                valid = ids.is_valid()
                return ids.filter(valid), valid.to_numpy(zero_copy_only=False).astype(np.int64)
            return ids, counts
        return self._columns[name].raw(chunk)

    def _history_columns(self, name: str, feature: Feature, there: Sequence[str], where: str) -> list[str]:
        assert feature.derive is not None
        by, order = self._dataset.column_of(feature.derive.by), feature.derive.order
        if self._open_history_source is None:
            derive = feature.derive
            raise DataError(
                f"no column '{name}' (there are {', '.join(sorted(there))})",
                where=where,
                remedy=f"add it: lists of the last {derive.length} of '{derive.previous}', oldest first",
            )
        return [by, order] if order in there else [by]

    def _history(self, name: str, feature: Feature, chunk: Chunk) -> Jagged:
        derive = feature.derive
        assert derive is not None
        by, previous = self._dataset.column_of(derive.by), self._dataset.column_of(derive.previous)
        if name not in self._histories:
            assert self._open_history_source is not None
            source = self._open_history_source()
            source.require([by, derive.order, previous])
            table = feature.shares or name
            self._histories[name] = HistoryLookup(
                source,
                by,
                derive.order,
                previous,
                derive.length,
                lambda rows: self._encode(table, rows.column(previous), rows.where(previous)),
            )
        lookup, times = self._histories[name], None
        if derive.order in chunk.batch.schema.names:
            order = order_in(chunk.column(derive.order))
            if order.is_timed != lookup.order.is_timed:
                raise DataError(
                    f"has a {order.kind}, and the dataset is ordered by a {lookup.order.kind}",
                    where=chunk.where(derive.order),
                    remedy="write it as in the dataset, or leave the column out to use each user's latest history",
                )
            times = as_order(chunk, derive.order, order)
        return lookup.before(chunk.column(by), times, chunk.where(by))


def _hashed(ids: pa.Array) -> pa.Array:
    """Return the hashes of strings, uint64; the hash of null is null."""
    missing = ids.is_null().to_numpy(zero_copy_only=False)
    return pa.array(id_keys(pc.fill_null(ids, "")), mask=missing)
