"""Columns that order rows: which values are numbers or times, and rows that have neither."""

from __future__ import annotations

import datetime
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.columns.orders import order_in, require_one_unit
from trainer.data.errors import DataError
from trainer.data.prepare.bad_rows import bad_events
from trainer.data.prepare.preparation import BAD_ROWS, prepare
from trainer.data.sources.figures import profile
from trainer.data.sources.infer import propose
from trainer.data.sources.source import Source
from trainer.data.sources.user_rows import users_of
from trainer.spec import parse_dataset, parse_job

ROWS, BAD = 120, 77
TEXT = [f"2026-03-{row // 24 + 1:02d}T{row % 24:02d}:00:00.5Z" for row in range(ROWS)]
NUMBERS = [1_772_323_200 + 3600 * row for row in range(ROWS)]
MICROS = [one * 10**6 for one in NUMBERS]


def columns(times):
    return {
        "user": [row % 7 for row in range(ROWS)],
        "item": [row * 5 % 11 for row in range(ROWS)],
        "click": [row % 2 for row in range(ROWS)],
        "ts": times,
        "pos": range(ROWS),
    }


def write(folder, ending, times):
    return write_columns(folder, ending, columns(times))


def write_columns(folder, ending, found):
    path = folder / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table(found), path)
        return path
    rows = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    if ending == "jsonl":
        lines = [json.dumps(row) for row in rows]
    else:
        lines = [",".join(found), *(",".join("" if one is None else str(one) for one in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


USES = {
    "order": {"order": "ts"},
    "timestamp": {"timestamp": "ts"},
    "window": {"order": "pos", "partition": "ts"},
    "window of a zone": {"order": "pos", "partition": {"column": "ts", "timezone": "America/New_York"}},
    "feature": {"order": "ts", "features": {"user": {"timestamp": "ts"}, "item": {}}},
    "history": {
        "features": {
            "user": {},
            "item": {},
            "had": {
                "type": "id_list",
                "shares": "item",
                "derive": {"previous": "item", "by": "user", "order": "ts", "length": 3},
            },
        }
    },
}


def specs(path, use="order", limit=0.01, split="time"):
    dataset = {
        "name": "rows", "uri": str(path), "features": {"user": {}, "item": {}}, "label": {"column": "click"},
    }  # fmt: skip
    by_time = {} if use == "history" else {"evaluation": {"split": {"kind": split}}}
    window = {"window": {"start": "2026-03-31", "days": 90}} if use.startswith("window") else {}
    job = {"name": "job", "dataset": {"name": "rows", **window}, "model": {"kind": "dnn"}, **by_time}
    bad = {} if limit is None else {"max_bad_rows": limit}
    return parse_dataset(dataset | USES[use] | bad), parse_job(job)


def bad_rows_of(path, tmp_path, **settings):
    data = prepare(*specs(path, **settings), tmp_path / "run" / "data")
    file = tmp_path / "run" / BAD_ROWS
    return data, pq.read_table(file).select(["row", "column", "value", "reason"]).to_pylist() if file.exists() else []


@pytest.mark.parametrize(
    ("use", "ending", "bad"),
    [
        *((use, ending, "unknown") for use, ending in zip(USES, ["csv", "jsonl", "parquet"] * 2, strict=True)),
        *((use, "parquet", None) for use in USES),
        *(("order", ending, bad) for ending in ("csv", "jsonl") for bad in ("99999-01-01", None)),
        *((use, "csv", "2026-02-30T00:00:00Z") for use in ("order", "window")),
        ("order", "parquet", ""),
        ("window", "parquet", "0000-00-00"),
    ],
)
def test_a_row_without_a_time_is_bad_and_told_without_a_limit(ending, bad, use, tmp_path):
    path = write(tmp_path, ending, [*TEXT[:BAD], bad, *TEXT[BAD + 1 :]])
    data, found = bad_rows_of(path, tmp_path, use=use)
    reason = "no date" if use.startswith("window") else "no time"
    assert data.bad_rows == {reason: 1}
    assert found == [{"row": BAD, "column": "ts", "value": str(bad or None), "reason": reason}]
    assert sum(data.num_examples.values()) == ROWS - 1
    with pytest.raises(DataError) as caught:
        prepare(*specs(path, use=use, limit=None), tmp_path / "strict")
    what = "has no date|null where" if not bad else re.escape(f"'{bad}' is not a")
    assert re.search(rf"rows\.{ending}, column 'ts', row {BAD}: ({what})", str(caught.value))


@pytest.mark.parametrize(
    ("ending", "times", "value"),
    [
        ("csv", [*NUMBERS[:BAD], "unknown", *NUMBERS[BAD + 1 :]], "unknown"),
        ("csv", [*(one + 0.5 for one in NUMBERS[:BAD]), "unknown", *NUMBERS[BAD + 1 :]], "unknown"),
        ("parquet", pa.array([*map(float, NUMBERS[:BAD]), float("nan"), *NUMBERS[BAD + 1 :]]), "nan"),
        ("parquet", pa.array([*NUMBERS[:BAD], 2**64 - 1, *NUMBERS[BAD + 1 :]], pa.uint64()), f"{2**64 - 1}"),
        (
            "parquet",
            pa.array([*MICROS[:BAD], 2**62, *MICROS[BAD + 1 :]]).cast(pa.timestamp("us")),
            f"<value out of range: {2**62}>",
        ),
    ],
)
def test_a_bad_one_among_numbers_and_timestamps(ending, times, value, tmp_path):
    data, found = bad_rows_of(write(tmp_path, ending, times), tmp_path)
    assert found == [{"row": BAD, "column": "ts", "value": value, "reason": "no time"}]
    good = [row for row in range(ROWS) if row != BAD]
    clean = pa.array([NUMBERS[row] for row in good])
    pq.write_table(pa.table(columns(NUMBERS)).take(good).set_column(3, "ts", clean), tmp_path / "clean.parquet")
    expected = prepare(*specs(tmp_path / "clean.parquet"), tmp_path / "clean")
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(data.column(split, data.keys[1]), expected.column(split, expected.keys[1]))


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("other", ["2026-03-04T05:00:00", "2026-03-04", "1772323200"])
def test_times_of_several_kinds_name_values_of_both(other, ending, tmp_path):
    times = [one.replace(".5Z", "Z") for one in TEXT]
    path = write(tmp_path, ending, [*times[:BAD], other, *times[BAD + 1 :]])
    said = f"row {BAD}: '{other}' is no time with a zone, as '{times[0]}' before it is (write the whole column"
    with pytest.raises(DataError, match=re.escape(said)):
        prepare(*specs(path, limit=None), tmp_path / "strict")
    _, found = bad_rows_of(path, tmp_path)
    reason = f"no time with a zone, as '{times[0]}' is"
    assert found == [{"row": BAD, "column": "ts", "value": other, "reason": reason}]


@pytest.mark.parametrize(
    "second",
    [
        pa.array([datetime.datetime(2026, 3, 9)] * ROWS),
        pa.array(["2026-03-09T00:00:00"] * ROWS),
        pa.array(NUMBERS),
        pa.array(list(map(str, NUMBERS))),
    ],
    ids=["timestamps", "text", "numbers", "numbers as text"],
)
def test_a_later_file_of_another_kind_is_told(second, tmp_path):
    (tmp_path / "log").mkdir()
    for name, times in (("a", TEXT), ("b", second)):
        pq.write_table(pa.table(columns(times)), tmp_path / "log" / f"{name}.parquet")
    with pytest.raises(
        DataError, match=rf"b\.parquet, column 'ts', row 0: '.*' is no time with a zone, as '{TEXT[0]}'"
    ):
        prepare(*specs(tmp_path / "log", limit=None), tmp_path / "data")


@pytest.mark.parametrize("limit", [0.2, None])
@pytest.mark.parametrize("since", ["2026-01-01T00:00:00", "unknown", None])
def test_a_joined_row_without_a_time_makes_its_rows_bad(since, limit, tmp_path):
    pq.write_table(pa.table(columns([one.removesuffix("Z") for one in TEXT])), tmp_path / "rows.parquet")
    times = [since if item == 3 else "2026-01-01T00:00:00" for item in range(11)]
    brands = pa.table({"item": list(range(11)), "brand": list(range(11)), "since": times})
    pq.write_table(brands, tmp_path / "brands.parquet")
    dataset, job = specs(tmp_path / "rows.parquet", limit=limit)
    join = {"uri": "brands.parquet", "on": "item", "column": "brand", "timestamp": "since"}
    document = dataset.model_dump(mode="json")
    dataset = parse_dataset(document | {"features": {"user": {}, "item": {}, "brand": {"join": join}}})
    if since == "2026-01-01T00:00:00":
        assert not prepare(dataset, job, tmp_path / "data").bad_rows
    elif limit is None:
        with pytest.raises(DataError, match=r"brands\.parquet, column 'since', row 3: ('unknown' is not a|null)"):
            prepare(dataset, job, tmp_path / "data")
    else:
        (reason,) = (found := prepare(dataset, job, tmp_path / "data").bad_rows)
        assert re.fullmatch(r"no time of 'brand' in .*brands\.parquet", reason)
        assert found[reason] == sum(item == 3 for item in columns(TEXT)["item"])


def test_a_profile_and_lists_of_users_leave_bad_times_out(tmp_path):
    path = write(tmp_path, "csv", [*TEXT[:BAD], "unknown", *TEXT[BAD + 1 :]])
    dataset, _ = specs(path)
    shown = profile(dataset)["order"]
    assert shown == {
        "column": "ts",
        "min": "2026-03-01T00:00:00.500000+00:00",
        "max": "2026-03-05T23:00:00.500000+00:00",
    }
    lists = users_of(Source(str(path)), dataset, bad_events)
    assert sum(map(len, lists["item"].to_pylist())) == sum(columns(TEXT)["click"]) - BAD % 2
    strict, _ = specs(path, limit=None)
    for read in (lambda: profile(strict), lambda: users_of(Source(str(path)), strict)):
        with pytest.raises(DataError, match=rf"row {BAD}: 'unknown' is not a number or time"):
            read()


def test_bounds_of_text_are_of_instants(tmp_path):
    times = ["2026-03-01T23:30:00-05:00", "2026-03-02T01:00:00+02:00"] * (ROWS // 2)
    dataset, _ = specs(write(tmp_path, "parquet", times))
    assert profile(dataset)["order"]["min"] == "2026-03-01T23:00:00+00:00"


@pytest.mark.parametrize("split", ["time", "per_user_last"])
@pytest.mark.parametrize("units", [(1, 10**3), (10**3, 10**6), (10**3, 10**9)])
def test_times_in_several_units_are_told_with_values(units, split, tmp_path):
    times = [one * units[row == BAD] for row, one in enumerate(NUMBERS)]
    with pytest.raises(DataError, match=rf"several units: .*{times[BAD]} are .*\(write all of them in one unit\)"):
        prepare(*specs(write(tmp_path, "parquet", times), split=split), tmp_path / "data")


@pytest.mark.parametrize("stray", [1, 500_000_000])
def test_a_stray_number_hides_no_second_unit(stray):
    times = [1_772_323_200 + row for row in range(10)] + [1_772_323_200_000 + row for row in range(10)]
    with pytest.raises(DataError, match="several units"):
        require_one_unit(np.array([*times, stray]), "")


@pytest.mark.parametrize(
    "values", [[0, 0], [-5, 3], [1, 10**15], [1_772_323_200, 0], [1_772_323_200, 5, 1_772_323_200_000]]
)
def test_numbers_that_are_no_times_have_no_unit(values):
    require_one_unit(np.array(values), "")
    require_one_unit(np.array(values, dtype=np.float64), "")


@pytest.mark.parametrize(
    ("values", "kind", "numbers"),
    [
        (["7", "10", "9"], "number", [7, 10, 9]),
        (["7", "10.5", "1e2"], "number", [7.0, 10.5, 100.0]),
        (["1772323200123456789"], "number", [1772323200123456789]),
        (["1970-01-01", "1970-01-01T00:00:01"], "time without a zone", [0, 10**6]),
        ([True, False], "number", [1, 0]),
    ],
)
def test_text_is_numbers_or_times(values, kind, numbers):
    array = pa.array(values)
    order = order_in(array)
    found, unreadable, other = order.read(array)
    assert (order.kind, found.tolist()) == (kind, numbers)
    assert not (unreadable | other).any()


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_text_with_hours_is_proposed_as_a_time_and_never_as_ids(ending, tmp_path):
    found = {"user": NUMBERS, "item": NUMBERS, "at": TEXT, "by": TEXT}
    document = propose(write_columns(tmp_path, ending, found)).document
    assert (document["timestamp"], set(document["features"])) == ("at", {"user", "item"})
