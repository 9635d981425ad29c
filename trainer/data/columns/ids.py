"""Columns of ids: single ids, lists of ids, and ids that are made from texts or times. Torch-free.

A class for each kind of id reads the ids of rows. Preparation, one-pass training, scoring, joined files, profiles and
predictions of memory all use these objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns import values
from trainer.data.columns.base import Mask, Problem
from trainer.data.columns.ngrams import ngram_lists, require_text
from trainer.data.columns.text_lists import require_clear
from trainer.data.columns.values import Kind
from trainer.data.columns.weights import weighted_lists
from trainer.data.errors import DataError
from trainer.data.sources.source import Chunk, Source
from trainer.data.sources.times import read_days, read_instants, written
from trainer.data.sources.types import is_text
from trainer.spec import Feature
from trainer.spec.ngrams import NGrams

Lists = tuple[pa.Array, npt.NDArray[np.int64]]
"""Ids of all lists, one list after the other, and the length of each list, int64 [lists]."""
Ids = tuple[pa.Array, npt.NDArray[np.int64] | None]
"""Ids of all rows, one row after the other, and the number of each row's ids; None: every row has one id or null."""
HOUR_MICROS = 3_600_000_000
EPOCH_WEEKDAY = 3
"""Weekday of 1970-01-01, a Thursday, where Monday is 0."""
# Text that may be a 64-bit integer, without a plus sign or leading zeros.
_INTEGER = r"^(0|-?[1-9][0-9]{0,18})$"


@dataclass(frozen=True)
class IdColumn:
    """A column with one id in each row.

    ``domain`` is the name of the set of ids that the column's codes refer to: a table's name, or ``by:COLUMN``.
    ``weights``: name of the column with the weights of a list's ids; None: they have no weights.
    """

    column: str
    domain: str
    weights: str | None = None
    is_list: ClassVar[bool] = False
    makes_ids: ClassVar[bool] = False
    """True if ids are integers computed from the column's values, such as hashes of text or hours of times."""
    holds_text: ClassVar[bool] = False
    """True if the column is read as text, even if all values in a file without declared types are digits."""

    def kind(self, type_: pa.DataType, where: str) -> Kind:
        """Return the kind of ids, "int" or "string", that a column of this type has.

        Raises:
            DataError: no ids can be read from the type.
        """
        return values.id_kind(values.element_type(type_), where)

    def raw(self, chunk: Chunk) -> Ids:
        """Return the ids of the chunk's rows, in the type that the column has.

        Raises:
            DataError: the column does not hold ids of this form, such as lists where single ids are expected.
        """
        column = chunk.column(self.column)
        if values.is_list(column.type):
            raise DataError(
                f"holds {column.type}, the model reads one id for each row",
                where=chunk.where(self.column),
                remedy="give single ids",
            )
        return column, None

    def read(self, chunk: Chunk, kind: Kind) -> Ids:
        """Return the ids of :meth:`raw`, converted to int64 or large_string."""
        ids, lengths = self.raw(chunk)
        return values.as_ids(ids, kind, chunk.where(self.column)), lengths

    def elements(self, chunk: Chunk, split: bool) -> Lists:
        """Return the ids in each row of a joined file as a list; with ``split``, a text is split into ids."""
        return values.as_lists(chunk, self.column, split)

    def require_clear(self, source: Source) -> None:
        """Check that the separator of a column's lists is clear, if lists are written as text.

        Raises:
            DataError: a value may be a list or one id, such as ``27,9``, and no value has a pipe.
        """

    def problems(self, chunk: Chunk, kind: Kind) -> Iterator[Problem]:
        """Yield the bad values of the chunk's rows: those that cannot be read as ids of the kind."""
        array = chunk.column(self.column)
        if kind == "int" or not is_text(values.element_type(array.type)):
            yield self.column, "no integer id", ~(_are_lists_of_ids(array) if self.is_list else are_ids(array))
        elif self.is_list:
            yield self.column, "no list", values.raw_lists(array)[2]

    def most_ids(self, source: Source, num_rows: int) -> int:
        """Return an upper bound on the number of distinct ids in ``num_rows`` rows, from the files' statistics."""
        counts = pa.types.is_integer(values.element_type(source.column_type(self.column))) and not self.is_list
        span = source.reader.integer_span(self.column) if counts else None
        return num_rows if span is None else min(num_rows, span)


class ListColumn(IdColumn):
    """A column with a list of ids in each row."""

    is_list = True

    def raw(self, chunk: Chunk) -> Ids:
        return values.as_lists(chunk, self.column)

    def problems(self, chunk: Chunk, kind: Kind) -> Iterator[Problem]:
        yield from super().problems(chunk, kind)
        if self.weights is not None:
            yield self.weights, "weights that do not match the ids of the list", weighted_lists(chunk, self).bad

    def require_clear(self, source: Source) -> None:
        require_clear(source.stream([self.column]), self.column)


@dataclass(frozen=True)
class TextColumn(IdColumn):
    """A column with a text in each row, from which the hashed ids of its n-grams are read as a list."""

    ngrams: NGrams = field(default_factory=NGrams)
    is_list = True
    makes_ids = True
    holds_text = True

    def kind(self, type_: pa.DataType, where: str) -> Kind:
        require_text(type_, where)
        return "int"

    def raw(self, chunk: Chunk) -> Ids:
        return self.elements(chunk)

    def elements(self, chunk: Chunk, split: bool = False) -> Lists:
        column, where = chunk.column(self.column), chunk.where(self.column)
        require_text(column.type, where)
        return ngram_lists(column, self.ngrams, where)

    def problems(self, chunk: Chunk, kind: Kind) -> Iterator[Problem]:
        yield from ()

    def most_ids(self, source: Source, num_rows: int) -> int:
        return self.ngrams.buckets


@dataclass(frozen=True)
class CalendarColumn(IdColumn):
    """A column with a time in each row, read as its hour, 0 to 23, or its weekday, 0 (Monday) to 6, in UTC."""

    unit: Literal["hour", "weekday"] = "hour"
    makes_ids = True

    def kind(self, type_: pa.DataType, where: str) -> Kind:
        is_number = pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_null(type_)
        is_time = pa.types.is_timestamp(type_) or (pa.types.is_date(type_) and self.unit == "weekday")
        if not (is_text(type_) or is_number or is_time):
            raise DataError(
                f"holds {type_}, which has no {self.unit}",
                where=where,
                remedy="write times in ISO 8601 or since 1970, or leave calendar out",
            )
        return "int"

    def raw(self, chunk: Chunk) -> Ids:
        ids, bad = self._ids(chunk)
        if bad.any():
            row = int(np.argmax(bad))
            raise DataError(
                f"'{written(chunk.column(self.column), row)}' has no {self.unit}",
                where=chunk.where(self.column, row),
                remedy="write ISO 8601, or a time since 1970 of the years 1990 to 2032; remove the row, or set "
                "max_bad_rows of the dataset",
            )
        return ids, None

    def elements(self, chunk: Chunk, split: bool) -> Lists:
        ids, _ = self.raw(chunk)
        return ids.drop_null(), ids.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)

    def problems(self, chunk: Chunk, kind: Kind) -> Iterator[Problem]:
        yield self.column, f"no {self.unit}", self._ids(chunk)[1]

    def most_ids(self, source: Source, num_rows: int) -> int:
        return 24 if self.unit == "hour" else 7

    def _ids(self, chunk: Chunk) -> tuple[pa.Array, Mask]:
        """Return the ids, int64 with null for unreadable times, and a mask of values neither null nor times."""
        column = chunk.column(self.column)
        if self.unit == "hour":
            instants, is_time = read_instants(column)
            ids = instants // HOUR_MICROS % 24
        else:
            days, is_time = read_days(column)
            ids = (days + EPOCH_WEEKDAY) % 7
        return pa.array(ids, pa.int64(), mask=~is_time), values.is_there(column) & ~is_time


def id_column(feature: Feature, column: str, domain: str) -> IdColumn:
    """Return the object that reads a feature's ids from a column, by the feature's settings."""
    if feature.effective_ngrams is not None:
        return TextColumn(column, domain, ngrams=feature.effective_ngrams)
    if feature.calendar is not None:
        return CalendarColumn(column, domain, unit=feature.calendar)
    return (ListColumn if feature.is_list else IdColumn)(column, domain, feature.weights)


def _are_lists_of_ids(array: pa.Array) -> Mask:
    """Return a mask that is True for the lists whose elements are all integer ids or missing (:func:`are_ids`)."""
    elements, parents, unreadable = values.raw_lists(array)
    mask = ~unreadable
    mask[parents[~are_ids(elements)]] = False
    return mask


def are_ids(array: pa.Array) -> Mask:
    """Return a mask of the values that :func:`~trainer.data.columns.values.as_ids` reads as integers, or as missing."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(array.type):
        numbers = array.to_numpy(zero_copy_only=False)
        whole = (numbers == np.floor(numbers)) & (np.abs(numbers) < values.exact_below(array.type))
        return ~valid | np.isnan(numbers) | whole
    may_be = valid
    if values.is_list(array.type):
        may_be = np.zeros(len(array), dtype=bool)
    elif is_text(array.type):
        may_be = pc.match_substring_regex(array, _INTEGER).fill_null(False).to_numpy(zero_copy_only=False)
    mask = ~valid
    # Find the values that are too large by bisection.
    work = [np.flatnonzero(may_be)]
    while work:
        places = work.pop()
        try:
            values.as_ids(array.take(pa.array(places)), "int", "")
            mask[places] = True
        except DataError:
            if len(places) > 1:
                work += np.array_split(places, 2)
    return mask
