"""Hours and weekdays of times, in every form that a column may have them, in preparation, one pass and scoring."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.batches.keys import read_features
from trainer.data.columns.ids import CalendarColumn
from trainer.data.columns.row_encoder import RowEncoder
from trainer.data.errors import DataError
from trainer.data.one_pass.data import OnePassData
from trainer.data.prepare.plan import make_plan
from trainer.data.prepare.preparation import BAD_ROWS, prepare
from trainer.data.sources.source import Source
from trainer.inference.parquet_scoring import chunk_of
from trainer.runs.inheritance import _in_words
from trainer.sizing.estimate import _bounds
from trainer.spec import Feature, SpecError, parse_dataset, parse_job

TIMES = [datetime.datetime(2024, 2, 29, 23, 59, 59, 999999), None, datetime.datetime(1969, 12, 31, 0, 0)]
HOURS, WEEKDAYS = [23, None, 0], [3, None, 2]
FORMS = {
    "seconds": pa.array([None if one is None else one.replace(microsecond=0) for one in TIMES], pa.timestamp("s")),
    "microseconds": pa.array(TIMES, pa.timestamp("us")),
    "nanoseconds": pa.array(TIMES, pa.timestamp("us")).cast(pa.timestamp("ns")),
    "a zone": pa.array(TIMES, pa.timestamp("us")).cast(pa.timestamp("us", "Asia/Tokyo")),
    "text": pa.array([None if one is None else one.isoformat() for one in TIMES]),
    "text with a zone": pa.array(["2024-03-01T00:59:59.999999+01:00", None, "1969-12-31 00:00:00Z"]),
}


def read(array: pa.Array, unit):
    column = CalendarColumn("at", "t", unit=unit)
    column.kind(array.type, "here")
    return column.raw(chunk_of(pa.table({"at": array})))[0].to_pylist()


@pytest.mark.parametrize("form", FORMS)
def test_times_in_utc(form):
    assert read(FORMS[form], "hour") == HOURS
    assert read(FORMS[form], "weekday") == WEEKDAYS


@pytest.mark.parametrize("per_second", [1, 10**3, 10**6, 10**9])
def test_numbers_since_1970_have_the_unit_of_their_size(per_second):
    at = int(datetime.datetime(2024, 2, 29, 23, 30, tzinfo=datetime.UTC).timestamp()) * per_second
    for array in (pa.array([at, None]), pa.array([str(at), None])):
        assert read(array, "hour") == [23, None]
        assert read(array, "weekday") == [3, None]


def test_a_day_has_a_weekday_and_no_hour():
    days = pa.array([datetime.date(2024, 2, 29)])
    assert read(days, "weekday") == [3]
    with pytest.raises(DataError, match=r"here: holds date32.*, which has no hour"):
        read(days, "hour")
    with pytest.raises(DataError, match=r"column 'at', row 1: '2024-02-29' has no hour"):
        read(pa.array(["2024-02-29T01:00:00", "2024-02-29"]), "hour")


SPECS = [
    ({"type": "id_list", "calendar": "hour"}, "calendar makes one id of a time"),
    ({"type": "dense", "calendar": "hour"}, "calendar makes one id of a time"),
    ({"type": "id", "calendar": "minute"}, "hour"),
]


@pytest.mark.parametrize(("feature", "message"), SPECS)
def test_calendars_of_something_else_are_refused(feature, message):
    with pytest.raises(ValueError, match=message):
        Feature(**feature)


def specs(path, one_pass=False, **changes):
    features = {
        "user": {"type": "id"}, "item": {"type": "id"},
        "hour": {"column": "at", "calendar": "hour"}, "weekday": {"column": "at", "calendar": "weekday"},
    }  # fmt: skip
    dataset = {"name": "rows", "uri": str(path), "features": features, "label": {"column": "click"}}
    job = {
        "name": "job", "dataset": {"name": "rows", "one_pass": one_pass}, "model": {"kind": "dcnv2"}, "batch_size": 64,
        "optimizer": {"kind": "adagrad"}, "evaluation": {"split": {"kind": "random", "validation": 0, "test": 0}},
        "tables": {name: {"capacity": 64} for name in features} if one_pass else {},
    }  # fmt: skip
    return parse_dataset(dataset | changes), parse_job(job)


@pytest.mark.parametrize(
    "changes",
    [
        {"features": {"user": {"type": "id"}, "item": {"type": "id", "calendar": "hour"}}},
        {
            "features": {
                "user": {"type": "id"},
                "item": {"type": "id"},
                "hour": {"column": "at", "calendar": "hour"},
                "past": {"type": "id_list", "derive": {"previous": "hour", "by": "user", "order": "at", "length": 2}},
            }
        },
    ],
)
def test_no_name_of_other_ids(tmp_path, changes):
    with pytest.raises(SpecError, match="is a feature of the calendar"):
        specs(tmp_path / "rows.parquet", **changes)


def write(path, count=200):
    rng = np.random.default_rng(3)
    at = pa.array(rng.integers(1_600_000_000, 1_700_000_000, count), pa.timestamp("s"))
    columns = {name: rng.integers(0, most, count) for name, most in {"user": 9, "item": 20, "click": 2}.items()}
    pq.write_table(pa.table(columns | {"at": at}), path)
    return [(one.as_py().hour, one.as_py().weekday()) for one in at]


def test_one_pass_and_scoring_read_what_preparation_reads(tmp_path):
    path = tmp_path / "rows.parquet"
    expected = write(path)
    dataset, job = specs(path)
    data = prepare(dataset, job, tmp_path / "data")
    assert data.vocabulary("hour").to_pylist() == sorted({hour for hour, _ in expected})
    assert data.vocabulary("weekday").to_pylist() == sorted({day for _, day in expected})
    keys = {key.name: np.asarray(data.column("train", key)) for key in data.keys}
    ids = {name: data.vocabulary(name).to_numpy()[keys[name] - 2].tolist() for name in ("hour", "weekday")}
    assert list(zip(ids["hour"], ids["weekday"], strict=True)) == expected
    encoder = RowEncoder(dataset, read_features(dataset, job), {name: data.vocabulary(name) for name in data.tables})
    assert "at" not in encoder.id_columns | encoder.text_columns
    (chunk,) = Source(str(path)).stream(encoder.columns(["user", "item", "at"], "rows"))
    coded = encoder.encode(chunk)
    for name in ("hour", "weekday"):
        np.testing.assert_array_equal(coded.rows[name], keys[name])
    _, of_one_pass = specs(path, one_pass=True)
    once = OnePassData.of(prepare(dataset, of_one_pass, tmp_path / "once").directory, dataset, of_one_pass)
    (window,) = once.all_windows()
    for key, hashes in zip(once.keys, window.rows.columns, strict=True):
        # As equal as the rows of the preparation.
        _, ours = np.unique(hashes, return_inverse=True)
        _, theirs = np.unique(keys[key.name], return_inverse=True)
        assert len(set(zip(ours.tolist(), theirs.tolist(), strict=True))) == len(set(theirs.tolist()))
    assert _bounds(make_plan(dataset, job), 10**9)["hour"] == 24
    settings = [_in_words(name, dataset.features[name], dataset, job) for name in ("hour", "weekday")]
    assert [one["calendar"] for one in settings] == ["hour", "weekday"]


def test_what_is_no_time_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.parquet"
    write(path, 200)
    rows = pq.read_table(path)
    at = rows["at"].cast(pa.string()).to_pylist()
    at[7] = "yesterday"
    pq.write_table(rows.set_column(3, "at", pa.array(at)), path)
    with pytest.raises(DataError, match=r"rows.parquet, column 'at', row 7: 'yesterday' has no hour .*max_bad_rows"):
        prepare(*specs(path), tmp_path / "data")
    data = prepare(*specs(path, max_bad_rows=0.01), tmp_path / "data")
    assert data.num_examples["train"] == 199
    (bad,) = pq.read_table(tmp_path / BAD_ROWS).to_pylist()
    assert {"row": 7, "column": "at", "value": "yesterday", "reason": "no hour"}.items() <= bad.items()


def test_times_of_a_joined_file(tmp_path):
    path = tmp_path / "rows.parquet"
    write(path)
    at = [datetime.datetime(2024, 1, 1 + number % 7, number) if number else None for number in range(20)]
    pq.write_table(
        pa.table({"item": np.arange(20), "added": pa.array(at, pa.timestamp("us"))}), tmp_path / "items.parquet"
    )
    join = {"uri": "items.parquet", "on": "item", "column": "added"}
    of_times = {name: {"join": join, "calendar": unit} for name, unit in {"hour": "hour", "day": "weekday"}.items()}
    dataset, job = specs(path, features={"user": {"type": "id"}, "item": {"type": "id"}} | of_times)
    data = prepare(dataset, job, tmp_path / "data")
    keys = {key.name: np.asarray(data.column("train", key)) for key in data.keys}
    encoder = RowEncoder(dataset, read_features(dataset, job), {name: data.vocabulary(name) for name in data.tables})
    (chunk,) = Source(str(path)).stream(encoder.columns(["user", "item"], "rows"))
    coded = encoder.encode(chunk)
    of_item = [at[item] for item in chunk.column("item").to_pylist()]
    for name, expected in {
        "hour": [None if one is None else one.hour for one in of_item],
        "day": [None if one is None else one.weekday() for one in of_item],
    }.items():
        ids = [None, *data.vocabulary(name).to_pylist()]
        assert [ids[row - 1] for row in keys[name]] == expected
        np.testing.assert_array_equal(coded.rows[name], keys[name])
