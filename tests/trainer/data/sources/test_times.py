"""Times and days: the same instant is the same number, and of the same day, however a file writes it."""

from __future__ import annotations

import datetime
import json
import random
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns.orders import as_order, order_of
from trainer.data.errors import DataError
from trainer.data.sources.source import Source, Window
from trainer.data.sources.times import DATE, NAIVE, NUMBER, UNREADABLE, ZONED, read_days, read_times

UTC = datetime.UTC
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=UTC)
MICRO = datetime.timedelta(microseconds=1)
ZONES = ["UTC", "America/New_York", "Asia/Kolkata", "Pacific/Apia", "America/St_Johns", "Africa/Casablanca"]
# Around midnights, and the changes of clocks on March 8 and November 1 in New York.
DAYS = [datetime.date(2026, 3, 7), datetime.date(2026, 3, 8), datetime.date(2026, 10, 31), datetime.date(2026, 11, 1)]
INSTANTS = [
    datetime.datetime(day.year, day.month, day.day, tzinfo=UTC) + datetime.timedelta(hours=hour, microseconds=offset)
    for day in DAYS
    for hour in range(0, 48, 3)
    for offset in (-1, 0, 250_000)
]


def shifted(instants, seed=0):
    """The instants with offsets of quarters of an hour."""
    rng = random.Random(seed)
    offsets = [datetime.timedelta(minutes=15 * rng.randint(-48, 56)) for _ in instants]
    return [at.astimezone(datetime.timezone(offset)) for at, offset in zip(instants, offsets, strict=True)]


def counts(instants, per_second):
    return [(at - EPOCH) // MICRO * per_second // 10**6 for at in instants]


def naive(instants):
    return [at.replace(tzinfo=None) for at in instants]


FORMS = {
    "offsets": lambda instants: [at.isoformat() for at in shifted(instants)],
    "offsets without a colon": lambda instants: [at.strftime("%Y-%m-%d %H:%M:%S.%f %z") for at in shifted(instants)],
    "Z": lambda instants: [f"{at:%Y-%m-%dT%H:%M:%S.%f}Z" for at in instants],
    "UTC": lambda instants: [f"{at:%Y-%m-%d %H:%M:%S.%f} UTC" for at in instants],
    "no zone": lambda instants: [at.isoformat() for at in naive(instants)],
    "nanoseconds": lambda instants: [f"{at:%Y-%m-%dT%H:%M:%S.%f}789Z" for at in instants],
}
TYPES = {
    "timestamp": lambda instants: pa.array(naive(instants), pa.timestamp("us")),
    "timestamp of a zone": lambda instants: pa.array(instants, pa.timestamp("ns", "Asia/Tokyo")),
    "seconds": lambda instants: pa.array(counts(instants, 1)),
    "milliseconds": lambda instants: pa.array(counts(instants, 10**3)),
    "microseconds": lambda instants: pa.array(counts(instants, 10**6)),
    "nanoseconds": lambda instants: pa.array(counts(instants, 10**9)),
    "seconds in floats": lambda instants: pa.array([(at - EPOCH).total_seconds() for at in instants]),
}
TEXTS = [(form, ending) for form in FORMS for ending in ("csv", "jsonl", "parquet")]
NUMBERS = [("seconds", "csv"), ("milliseconds", "jsonl"), ("seconds in floats", "csv"), ("seconds in floats", "jsonl")]


def write(path, values):
    """Write the columns n and ts."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"n": range(len(values)), "ts": values}), path)
        return path
    values = values.to_pylist() if isinstance(values, pa.Array) else values
    rows = [{"n": number, "ts": value} for number, value in enumerate(values)]
    lines = [json.dumps(row) if path.suffix == ".jsonl" else f"{row['n']},{row['ts']}" for row in rows]
    path.write_text("\n".join([*(["n,ts"] if path.suffix == ".csv" else []), *lines]) + "\n")
    return path


def inside(path, day, zone, **settings):
    source = Source(str(path), Window("ts", day, day, zone, **settings))
    return [row for chunk in source.stream(["n"]) for row in chunk.column("n").to_pylist()]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
@pytest.mark.parametrize(("form", "ending"), [*TEXTS, *((form, "parquet") for form in TYPES), *NUMBERS])
def test_a_window_has_the_same_rows_however_times_are_written(form, ending, zone, tmp_path):
    path = write(tmp_path / f"rows.{ending}", {**FORMS, **TYPES}[form](INSTANTS))
    for day in DAYS:
        expected = [number for number, at in enumerate(INSTANTS) if at.astimezone(ZoneInfo(zone)).date() == day]
        assert inside(path, day, zone) == expected
        assert expected


DATES = [(str, ending) for ending in ("csv", "jsonl", "parquet", "folder")]
DATES += [("{:%Y%m%d}".format, ending) for ending in ("csv", "jsonl", "parquet", "folder")]
DATES += [(lambda day: day, "parquet"), (lambda day: int(f"{day:%Y%m%d}"), "parquet")]


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Apia"])
@pytest.mark.parametrize(("written", "ending"), DATES)
def test_a_plain_date_is_that_day_in_every_zone(written, ending, zone, tmp_path):
    dates = [day + datetime.timedelta(more) for day in DAYS for more in (-1, 0, 1)]
    path = tmp_path / "log"
    if ending == "folder":
        for number, day in enumerate(dates):
            folder = path / f"part={number:02d}" / f"ts={written(day)}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table({"n": [number]}), folder / "rows.parquet")
    else:
        path = write(tmp_path / f"rows.{ending}", [written(day) for day in dates])
    for day in DAYS:
        assert inside(path, day, zone) == [number for number, one in enumerate(dates) if one == day]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_plain_date_among_times_is_that_day_too(ending, tmp_path):
    path = write(tmp_path / f"rows.{ending}", ["2026-03-01", "2026-03-01T02:00:00", "2026-03-02T02:00:00"])
    assert inside(path, datetime.date(2026, 3, 1), "America/New_York") == [0, 2]


@pytest.mark.parametrize(("form", "ending"), TEXTS)
def test_the_same_instant_is_the_same_number(form, ending, tmp_path):
    source = Source(str(write(tmp_path / f"rows.{ending}", FORMS[form](INSTANTS))))
    source.require(["ts"])
    (chunk,) = source.stream(["ts"])
    assert as_order(chunk, "ts", order_of(source, "ts")).tolist() == counts(INSTANTS, 10**6)


@given(
    st.lists(st.integers(-(10**9) * 40, 10**9 * 60), min_size=1, max_size=30),
    st.sampled_from(ZONES),
    st.integers(0, 10**6 - 1),
)
def test_days_are_those_of_python(seconds, zone, micros):
    instants = [EPOCH + datetime.timedelta(seconds=second, microseconds=micros) for second in seconds]
    expected = [(at.astimezone(ZoneInfo(zone)).date() - EPOCH.date()).days for at in instants]
    for values in (
        pa.array([at.isoformat() for at in shifted(instants, micros)]),
        pa.array(naive(instants), pa.timestamp("us")),
        pa.array(instants, pa.timestamp("us", "America/Lima")),
    ):
        days, is_day = read_days(values, zone)
        assert (days.tolist(), is_day.all()) == (expected, True)
        assert read_times(values).instants.tolist() == counts(instants, 10**6)


def test_nanoseconds_before_1970_are_cut_towards_the_past():
    cut = [read_times(pa.array([-1, -1001]).cast(pa.timestamp("ns"))).instants.tolist()]
    cut.append(
        read_times(pa.array(["1969-12-31T23:59:59.999999999", "1969-12-31T23:59:59.999998999"])).instants.tolist()
    )
    assert cut == [[-1, -2], [-1, -2]]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("2026-03-01", DATE),
        ("2026-03-01T10", NAIVE),
        ("2026-03-01 10:00", NAIVE),
        ("2026-03-01T10:00:00.5", NAIVE),
        ("2026-03-01T10:00:00.1234567+05:45", ZONED),
        ("2026-03-01 10:00:00 UTC", ZONED),
        ("2026-03-01T10:00-05", ZONED),
        ("0001-01-01", DATE),
        ("9999-12-31T23:59:59.999999Z", ZONED),
        ("20260301", NUMBER),
        ("-1.5e3", NUMBER),
        *((text, UNREADABLE) for text in (
            "", "unknown", "0000-00-00", "0000-01-01", "2026-02-30", "2026-13-01", "99999-01-01", "2026-03-01T25:00:00",
            "2026-03-01T10:00:00+24:00", "9999-12-31T23:59:59-01:00", "2026-3-1", " 2026-03-01", "nan", "2026-03-01-10",
        )),
    ],
)  # fmt: skip
def test_a_value_is_read_alike_alone_and_among_others(text, form):
    alone = read_times(pa.array([text]))
    among = read_times(pa.array(["unknown", text, None, "2026-02-29", "2026-03-01T10:00:00Z"]))
    assert (alone.forms.tolist(), among.forms.tolist()) == ([form], [0, form, 0, 0, ZONED])
    assert form == NUMBER or among.instants[1] == alone.instants[0]


@pytest.mark.parametrize("type_", [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.date32()])
def test_what_lies_beyond_the_years_of_python_is_no_time(type_):
    width = pa.int32() if type_ == pa.date32() else pa.int64()
    values = pa.array([2**31 - 1 if type_ == pa.date32() else 2**62, 0, None], width).cast(type_)
    assert (read_times(values).forms > 0).tolist() == [False, True, False]


@pytest.mark.parametrize("number", [0, 20_513, 20_260_230, 99, 2_026_030_110, 202_603_011_000, 20_260_301.5, -5])
def test_a_number_that_may_be_several_days_is_none(number):
    for values in (pa.array([number]), pa.array([str(number)]), pa.array([float(number)])):
        assert not read_days(values)[1].any()


def test_a_value_that_is_no_day_is_told_with_its_row_or_kept(tmp_path):
    path = write(tmp_path / "rows.csv", ["2026-03-01", "unknown", "2026-03-02"])
    day = datetime.date(2026, 3, 2)
    with pytest.raises(DataError, match=r"rows\.csv, column 'ts', row 1: 'unknown' is not a date \(write YYYY-MM-DD"):
        inside(path, day, "UTC")
    assert inside(path, day, "UTC", keeps_undated=True) == [1, 2]


def test_a_folder_that_is_no_day_is_told_or_kept(tmp_path):
    for number, name in enumerate(["2026-03-01", "__HIVE_DEFAULT_PARTITION__", "2026-03-02"]):
        (tmp_path / "log" / f"ts={name}").mkdir(parents=True)
        pq.write_table(pa.table({"n": [number]}), tmp_path / "log" / f"ts={name}" / "rows.parquet")
    day = datetime.date(2026, 3, 2)
    with pytest.raises(DataError, match=r"folder ts=__HIVE_DEFAULT_PARTITION__: has no date"):
        inside(tmp_path / "log", day, "UTC")
    assert sorted(inside(tmp_path / "log", day, "UTC", keeps_undated=True)) == [1, 2]


def test_days_of_many_instants_at_a_change_of_the_clock():
    change = int((datetime.datetime(2006, 10, 29, 2, 31, tzinfo=UTC) - EPOCH).total_seconds())
    seconds = np.arange(change - 7200, change + 7200, 7)  # clocks of St. John's went back at 00:01
    zone = ZoneInfo("America/St_Johns")
    expected = [(datetime.datetime.fromtimestamp(int(one), zone).date() - EPOCH.date()).days for one in seconds]
    assert sorted(set(np.diff(expected))) == [-1, 0, 1]
    assert read_days(pa.array(seconds).cast(pa.timestamp("s")), "America/St_Johns")[0].tolist() == expected
