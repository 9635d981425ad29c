"""Columns that order rows: numbers or times, as int64 or float64. Torch-free."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.base import Column, Mask
from trainer.data.errors import DataError
from trainer.data.sources.source import Chunk, Source
from trainer.data.sources.times import (
    ANY_NUMBER,
    NUMBER,
    UNITS,
    UNREADABLE,
    WHOLE_NUMBER,
    ZONED,
    cast_matching,
    read_times,
    written,
)
from trainer.data.sources.types import is_text

_NEARLY_ALL = 0.9
"""If at least this share of the positive numbers can be times since 1970, all positive numbers count as such times."""

Kind = Literal["number", "time without a zone", "time with a zone"]


@dataclass(frozen=True)
class Order:
    """The kind of the values in a column that orders rows.

    The column's type decides the kind of order; in a column of text, the first value that can be read decides.

    Attributes:
        kind: the kind of every value; a value of another kind is an error, or makes its row bad.
        first: the text that decided the kind; empty if the type did.
        is_whole: True if all numbers in a column of text are integers.
    """

    kind: Kind
    first: str = ""
    is_whole: bool = True

    @property
    def is_timed(self) -> bool:
        return self.kind != "number"

    def read(self, array: pa.Array) -> tuple[npt.NDArray[Any], Mask, Mask]:
        """Read numbers as int64 or float64, and times as int64 microseconds since 1970.

        Returns:
            The values; a mask of those that cannot be read (null, NaN, no time); a mask of those of another kind.
        """
        if not (is_text(array.type) or pa.types.is_temporal(array.type)):
            numbers, unreadable = _numbers(array)
            return numbers, unreadable, ~unreadable & self.is_timed
        times = read_times(array)
        unreadable = times.forms == UNREADABLE
        if self.is_timed:
            is_zoned = times.forms == ZONED
            other = (times.forms == NUMBER) | (is_zoned != (self.kind == "time with a zone"))
            return times.instants, unreadable, other & ~unreadable
        numbers, is_read = _numbers_of_text(array, self.is_whole)
        return numbers, unreadable | (~is_read & (times.forms == NUMBER)), times.forms > NUMBER

    def problems(self, array: pa.Array) -> Iterator[tuple[str, Mask]]:
        """Yield (reason, mask) of the values that cannot order rows, for each reason."""
        _, unreadable, other = self.read(array)
        yield "no time", unreadable
        yield f"no {self.kind}" + (f", as '{self.first}' is" if self.first else ""), other

    def shown(self, value: Any) -> str:
        """Return a value that :meth:`read` gave as text for messages: a number, or a time in ISO 8601."""
        if not self.is_timed:
            return f"{value}"
        at = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=int(value))
        return at.isoformat() + ("+00:00" if self.kind == "time with a zone" else "")


@dataclass(frozen=True)
class RowOrder(Column):
    """A column that orders rows."""

    name: str
    column: str
    order: Order
    type_of_first = True

    def read(self, chunk: Chunk) -> npt.NDArray[Any]:
        return as_order(chunk, self.column, self.order)


def order_name(column: str) -> str:
    """Return the name that the order of rows by a column has among a plan's columns of values."""
    return f"order {column}"


def order_of(source: Source, column: str) -> Order:
    """Return the kind of the values in a column, which :meth:`Source.require` must have checked.

    In a column of text the first rows are read; if they hold numbers, all rows are, because a single fraction makes
    every number a float.
    """
    type_ = source.column_type(column)
    found = _of_type(type_)
    if found is not None:
        return found
    # Read all rows, even if a subclass of Source leaves bad rows out: which rows are bad depends on this order.
    for chunk in Source.stream(source, [column]):
        array = chunk.column(column)
        if not is_text(array.type):
            continue
        found = found or _of_text(array)
        if found is not None and found.is_timed:
            break
        if found is not None and not _are_whole(array):
            return replace(found, is_whole=False)
    return found or Order("time without a zone")


def order_in(array: pa.Array) -> Order:
    """Return the kind of the values in an array, as :func:`order_of` does for a column of a source."""
    found = _of_type(array.type)
    if found is None:
        found = _of_text(array) or Order("time without a zone")
        return found if found.is_timed else replace(found, is_whole=_are_whole(array))
    return found


def as_order(chunk: Chunk, column: str, order: Order, purpose: str = "order of rows") -> npt.NDArray[Any]:
    """Return the values, int64 or float64 [rows], of a column that orders rows; ``purpose`` names it in errors.

    Raises:
        DataError: naming the first value that is missing, cannot be read, or is of another kind.
    """
    array = chunk.column(column)
    numbers, unreadable, other = order.read(array)
    bad = unreadable | other
    if not bad.any():
        return numbers
    row = int(np.argmax(bad))
    value, where = written(array, row), chunk.where(column, row)
    if value == "null" or value == "nan":
        raise DataError(
            f"{'NaN' if value == 'nan' else value} where the {purpose} must be",
            where=where,
            remedy="fill the value in, remove the row, or set max_bad_rows of the dataset",
        )
    if other[row]:
        raise DataError(
            f"'{value}' is no {order.kind}, as " + (f"'{order.first}' before it is" if order.first else "others are"),
            where=where,
            remedy="write the whole column as numbers, as times with a zone, or as times without one, which are in UTC",
        )
    raise DataError(
        f"'{value}' is not a number or time, as the {purpose} must be",
        where=where,
        remedy="write ISO 8601 of the years 1 to 9999 or a number, remove the row, set max_bad_rows of the dataset, or "
        "name another column",
    )


def unit_of(numbers: npt.NDArray[Any]) -> str | None:
    """Return the unit, such as "seconds", in which all these numbers are times since 1970; None if there is none."""
    found = (
        name
        for name, (_, first, end) in UNITS.items()
        if len(numbers) and first <= numbers.min() <= numbers.max() < end
    )
    return next(found, None)


def require_one_unit(numbers: npt.NDArray[Any], where: str) -> None:
    """Check that the numbers that order rows are not times since 1970 in different units.

    Raises:
        DataError: nearly all numbers above 0 are such times, in at least two units.
    """
    high = numbers.max()
    low = numbers.min(initial=high, where=numbers > 0)
    # Times in one unit differ by a factor of at most four.
    if float(high) < 200 * float(low) or high <= 0:
        return
    inside = {name: (numbers >= first) & (numbers < end) for name, (_, first, end) in UNITS.items()}
    shown = [f"{numbers[np.argmax(rows)]} are {name}" for name, rows in inside.items() if rows.any()]
    num_times = sum(int(rows.sum()) for rows in inside.values())
    if len(shown) > 1 and num_times >= _NEARLY_ALL * int((numbers > 0).sum()):
        raise DataError(
            f"has times since 1970 in several units: {' and '.join(shown)}",
            where=where,
            remedy="write all of them in one unit",
        )


def _of_type(type_: pa.DataType) -> Order | None:
    """Return the kind of values that a column type implies; None for text."""
    if is_text(type_):
        return None
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        return Order("time with a zone")
    return Order("time without a zone" if pa.types.is_temporal(type_) else "number")


def _of_text(array: pa.Array) -> Order | None:
    times = read_times(array)
    readable = np.flatnonzero(times.forms)
    if not len(readable):
        return None
    form, first = times.forms[readable[0]], written(array, int(readable[0]))
    if form == NUMBER:
        return Order("number", first)
    return Order("time with a zone" if form == ZONED else "time without a zone", first)


def _are_whole(array: pa.Array) -> bool:
    numbers = array.filter(pc.match_substring_regex(array, ANY_NUMBER))
    return pc.all(pc.match_substring_regex(numbers, WHOLE_NUMBER)).as_py() is not False


def _numbers_of_text(array: pa.Array, is_whole: bool) -> tuple[npt.NDArray[Any], Mask]:
    type_, shape = (pa.int64(), WHOLE_NUMBER) if is_whole else (pa.float64(), ANY_NUMBER)
    places, values = cast_matching(array, shape, type_)
    numbers, is_read = np.zeros(len(array), dtype=type_.to_pandas_dtype()), np.zeros(len(array), dtype=bool)
    numbers[places] = values.to_numpy(zero_copy_only=False)
    is_read[places] = np.isfinite(numbers[places])
    return numbers, is_read


def _numbers(array: pa.Array) -> tuple[npt.NDArray[Any], Mask]:
    """Return the values of a column of numbers, int64 or float64, and a mask of those that are missing or unreadable.

    Every value of a column of another type is unreadable.
    """
    type_ = array.type
    unreadable = array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        numbers = array.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
        return numbers, unreadable | np.isnan(numbers)
    if pa.types.is_uint64(type_):
        # Numbers beyond int64 would become negative.
        beyond = pc.greater(array, pa.scalar(2**63 - 1, pa.uint64())).fill_null(False).to_numpy(zero_copy_only=False)
        array, unreadable = pc.if_else(pa.array(beyond), pa.scalar(0, pa.uint64()), array), unreadable | beyond
    elif not (pa.types.is_integer(type_) or pa.types.is_boolean(type_)):
        return np.zeros(len(array), dtype=np.int64), np.ones(len(array), dtype=bool)
    return array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), unreadable
