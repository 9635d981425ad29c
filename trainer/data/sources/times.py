"""Reading of times and days from columns, as instants in microseconds since 1970 or days in a time zone. Torch-free.

A time without a zone is in UTC. A plain date is that day in every zone; its instant is midnight in UTC.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.errors import DataError
from trainer.data.sources.types import is_text

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

UNREADABLE, NUMBER, DATE, NAIVE, ZONED = range(5)
"""Forms of values: no time, a number, a plain date, a time without a zone, a time with a zone."""

_EPOCH = datetime.date(1970, 1, 1)
_FIRST_DAY = (datetime.date.min - _EPOCH).days
_END_DAY = (datetime.date.max - _EPOCH).days + 1
_DAY_SECONDS = 86_400
_DAY_MICROS = _DAY_SECONDS * 1_000_000
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# In these years a number has one unit only: as seconds, none of them is also a date with an hour, such as 2026010517.
_UNIT_DAYS = ((datetime.date(1990, 1, 1) - _EPOCH).days, (datetime.date(2033, 1, 1) - _EPOCH).days)
UNITS = {
    name: (count, *(day * _DAY_SECONDS * count for day in _UNIT_DAYS))
    for name, count in {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}.items()
}
"""Units of times given as numbers since 1970: units per second, and the range of numbers that are read in the unit.

A range is its first number (in 1990) and the number after its last (in 2033); the ranges do not overlap.
"""

_WRITTEN_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = r"[ T][0-9]{2}(:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?)?"
_SHAPES = (
    (DATE, _WRITTEN_DATE + "$", pa.timestamp("us")),
    (NAIVE, _WRITTEN_DATE + _CLOCK + "$", pa.timestamp("us")),
    (ZONED, _WRITTEN_DATE + _CLOCK + r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)$", pa.timestamp("us", "UTC")),
)
WHOLE_NUMBER = r"^[+-]?[0-9]{1,19}$"
ANY_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class Times:
    """Instants of a column's values, int64 microseconds since 1970, and the form of each value, uint8.

    The instant is valid only if the form is DATE, NAIVE or ZONED.
    """

    instants: Int64s
    forms: npt.NDArray[np.uint8]


def read_times(array: pa.Array) -> Times:
    """Return the times in a column of dates, timestamps in any unit, or text in ISO 8601."""
    type_ = array.type
    if is_text(type_):
        return _read_text(array)
    if pa.types.is_date(type_):
        counts, per_day, form = array.cast(pa.date32(), safe=False).cast(pa.int32()), 1, DATE
    elif pa.types.is_timestamp(type_):
        counts, per_day = array.cast(pa.int64()), _DAY_SECONDS * _PER_SECOND[type_.unit]
        form = NAIVE if type_.tz is None else ZONED
    else:
        return Times(np.zeros(len(array), dtype=np.int64), np.full(len(array), UNREADABLE, dtype=np.uint8))
    numbers = (counts.fill_null(0) if array.null_count else counts).to_numpy(zero_copy_only=False)
    if per_day > _DAY_MICROS:
        # Rounded down, as text is; Arrow would round towards 1970.
        instants = numbers // (per_day // _DAY_MICROS)
    else:
        instants = numbers if per_day == _DAY_MICROS else np.multiply(numbers, _DAY_MICROS // per_day, dtype=np.int64)
    forms = np.full(len(array), form, dtype=np.uint8)
    first, last = max(_FIRST_DAY * per_day, -(2**63)), min(_END_DAY * per_day - 1, 2**63 - 1)
    if len(numbers) and (numbers.min() < first or numbers.max() > last):
        beyond = (numbers < first) | (numbers > last)
        instants = np.where(beyond, np.where(numbers > 0, 2**63 - 1, -(2**63)), instants)
        forms[beyond] = UNREADABLE
    if array.null_count:
        forms[array.is_null().to_numpy(zero_copy_only=False)] = UNREADABLE
    return Times(instants, forms)


def _read_text(array: pa.Array) -> Times:
    try:
        found = text_as_times(array)
    except pa.ArrowInvalid:
        return _read_by_shape(_plainly_written(array))
    times = read_times(found)
    if found.type.tz is None:
        lengths = pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        times.forms[(times.forms == NAIVE) & (lengths == len("2026-01-31"))] = DATE
    return times


def text_as_times(array: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return text in ISO 8601 as timestamps in microseconds: without a zone if no text has a zone, else in UTC.

    Raises:
        pa.ArrowInvalid: a text is no time, or some texts have a zone and others none.
    """
    error = pa.ArrowInvalid()
    for write in (lambda text: text, _plainly_written):
        text = write(array)
        for type_ in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
            try:
                # Arrow writes an error text for each value that it cannot cast, which is slow: try a few values first.
                pc.cast(text.slice(0, 64), type_)
                return pc.cast(text, type_)
            except pa.ArrowInvalid as failed:
                error = failed
    raise error


def _plainly_written(array: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return texts of times with fractions cut to microseconds, and `` UTC`` and `` +0100`` as ``Z`` and ``+0100``."""
    text = pc.replace_substring(array, " UTC", "Z")
    return pc.replace_substring_regex(text, r"(\.[0-9]{6})[0-9]+| ([+-][0-9:]+)$", r"\1\2")


def _read_by_shape(text: pa.Array) -> Times:
    instants, forms = np.zeros(len(text), dtype=np.int64), np.full(len(text), UNREADABLE, dtype=np.uint8)
    for form, shape, type_ in _SHAPES:
        places, values = cast_matching(text, shape, type_)
        times = read_times(values)
        instants[places] = times.instants
        forms[places] = np.where(times.forms == UNREADABLE, UNREADABLE, form)
    forms[np.flatnonzero(pc.match_substring_regex(text, ANY_NUMBER).fill_null(False))] = NUMBER
    return Times(instants, forms)


def cast_matching(text: pa.Array, shape: str, type_: pa.DataType) -> tuple[Int64s, pa.Array]:
    """Return the positions, int64, of the texts that match ``shape`` and can be cast to ``type_``, and their values."""
    work, good = [np.flatnonzero(pc.match_substring_regex(text, shape).fill_null(False))], []
    while work:
        places = work.pop()
        try:
            good.append((places, pc.cast(text.take(pa.array(places)), type_)))
        except pa.ArrowInvalid:
            # Find the texts that cannot be cast, such as February 30, by bisection.
            if len(places) > 1:
                work += np.array_split(places, 2)
    if not good:
        return np.empty(0, dtype=np.int64), pa.array([], type_)
    return np.concatenate([places for places, _ in good]), pa.concat_arrays([values for _, values in good])


def written(array: pa.Array, position: int) -> str:
    """Return one value of a column as text, for messages. Times beyond the range of Python's datetime are allowed."""
    value = array[position]
    if not value.is_valid:
        return "null"
    return str(pc.cast(array.slice(position, 1), pa.string())[0] if pa.types.is_temporal(array.type) else value)


def no_day(column: pa.Array, position: int, where: str) -> DataError:
    """Return the error for a value of a partition column from which no day can be read."""
    if not column[position].is_valid:
        return DataError("has no date", where=where, remedy="fill the partition column in every row")
    return DataError(
        f"'{written(column, position)}' is not a date",
        where=where,
        remedy="write YYYY-MM-DD, YYYYMMDD, a time in ISO 8601, or seconds, milliseconds, microseconds or nanoseconds "
        "since 1970 of the years 1990 to 2032; or set max_bad_rows of the dataset",
    )


def read_days(column: pa.Array, zone: str = "UTC") -> tuple[Int64s, Mask]:
    """Return each value's day in a time zone, int64 days since 1970-01-01, and a mask of the values that have a day.

    Values are dates, times, text of either, or numbers: YYYYMMDD, or a time since 1970 whose unit follows from the
    number's size (``UNITS``).
    """
    type_ = column.type
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return _days_of_numbers(column, zone)
    times = read_times(column)
    is_day = times.forms >= DATE
    days = _days_of(times.instants, zone, times.forms > DATE)
    if is_text(type_) and (times.forms == NUMBER).any():
        for shape, number in ((ANY_NUMBER, pa.float64()), (WHOLE_NUMBER, pa.int64())):
            places, numbers = cast_matching(column, shape, number)
            days[places], is_day[places] = _days_of_numbers(numbers, zone)
    return days, is_day


def read_instants(column: pa.Array) -> tuple[Int64s, Mask]:
    """Return each value's instant, int64 microseconds since 1970, and a mask of the values that are instants.

    Values are times, text of times, or numbers since 1970 whose unit follows from the number's size (``UNITS``). A
    plain date is no instant.
    """
    type_ = column.type
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        numbers, valid, _ = _whole_numbers(column)
        instants, is_time = _instants_of_numbers(numbers)
        return instants, is_time & valid
    times = read_times(column)
    is_time = times.forms > DATE
    if is_text(type_) and (times.forms == NUMBER).any():
        for shape, number in ((ANY_NUMBER, pa.float64()), (WHOLE_NUMBER, pa.int64())):
            places, found = cast_matching(column, shape, number)
            times.instants[places], is_time[places] = read_instants(found)
    return times.instants, is_time


def _days_of(instants: Int64s, zone: str, is_instant: Mask) -> Int64s:
    """Return the days since 1970-01-01 of instants: in a zone if ``is_instant``, else (plain dates) in UTC."""
    if zone != "UTC":
        # Offsets from UTC are whole seconds; they add up within int64 for years 1 to 9999.
        instants = instants + np.where(is_instant, _offsets(instants // 1_000_000, ZoneInfo(zone)), 0) * 1_000_000
    return np.asarray(instants // _DAY_MICROS)


def _offsets(seconds: Int64s, zone: ZoneInfo) -> Int64s:
    """Return a zone's offset from UTC, in seconds, at each of these times in seconds since 1970."""
    # Arrow's own conversion is not used, because it knows no changes of offsets after 2037.
    days, of = np.unique(seconds // _DAY_SECONDS, return_inverse=True)
    edges = np.unique(np.concatenate([days, days + 1]))
    offsets = np.array([_offset(int(day) * _DAY_SECONDS, zone) for day in edges])
    begin, end = (offsets[np.searchsorted(edges, one)] for one in (days, days + 1))
    found = begin[of]
    for number in np.flatnonzero(begin != end):
        low, high = int(days[number]) * _DAY_SECONDS, int(days[number] + 1) * _DAY_SECONDS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _offset(middle, zone) == begin[number] else (low, middle)
        found[(of == number) & (seconds >= high)] = end[number]
    return found


def _offset(second: int, zone: ZoneInfo) -> int:
    # Python has no local times beyond the years 1 and 9999.
    inside = min(max(second, (_FIRST_DAY + 2) * _DAY_SECONDS), (_END_DAY - 2) * _DAY_SECONDS)
    at = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=inside)
    offset = at.astimezone(zone).utcoffset()
    assert offset is not None
    return offset // datetime.timedelta(seconds=1)


def _days_of_numbers(column: pa.Array, zone: str) -> tuple[Int64s, Mask]:
    numbers, valid, is_whole = _whole_numbers(column)
    days, is_day = _days_as_written(numbers)
    instants, is_time = _instants_of_numbers(numbers)
    days[is_time] = _days_of(instants[is_time], zone, is_time[is_time])
    return days, ((is_day & is_whole) | is_time) & valid


def _instants_of_numbers(numbers: Int64s) -> tuple[Int64s, Mask]:
    """Return numbers since 1970 as instants in microseconds, and a mask of the numbers in a range of ``UNITS``."""
    instants, is_time = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=bool)
    for per_second, first, end in UNITS.values():
        inside = (numbers >= first) & (numbers < end)
        of_unit = numbers[inside]
        instants[inside] = of_unit // 1000 if per_second > 10**6 else of_unit * (10**6 // per_second)
        is_time |= inside
    return instants, is_time


def _whole_numbers(column: pa.Array) -> tuple[Int64s, Mask, Mask | bool]:
    """Return (numbers rounded down to int64, mask of non-null values within int64, mask of whole numbers)."""
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    numbers = column.fill_null(0).to_numpy(zero_copy_only=False)
    is_whole: Mask | bool = True
    if pa.types.is_floating(column.type):
        valid = valid & (np.abs(numbers) < 2**63)
        given = np.where(valid, numbers, 0)
        numbers = np.floor(given)
        is_whole = numbers == given
    elif pa.types.is_unsigned_integer(column.type):
        numbers = np.minimum(numbers, 2**63 - 1)
    return numbers.astype(np.int64), valid, is_whole


def _days_as_written(numbers: Int64s) -> tuple[Int64s, Mask]:
    """Return the days since 1970-01-01 of integers YYYYMMDD, and a mask of the integers that are such dates."""
    year, month, day = numbers // 10_000, numbers // 100 % 100, numbers % 100
    may_be = (year >= 1000) & (year <= 9999) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    months = np.where(may_be, (year - 1970) * 12 + month - 1, 0)
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    end = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    days = first + day - 1
    return days, may_be & (days < end)
