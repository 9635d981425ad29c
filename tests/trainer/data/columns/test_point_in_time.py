"""A feature from after its row is refused where rows are held out by time, with the rows at fault; others pass."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.spec import SpecError

DAY = datetime.timedelta(days=1)
START = datetime.datetime(2026, 1, 1)
PRICE = {"type": "dense", "timestamp": "priced_at"}
FEATURES = {"user": {"type": "id"}, "item": {"type": "id"}, "price": PRICE}


def table(clicks, late=()):
    rows = clicks(200)
    times = [START + int(ts) * DAY for ts in np.asarray(rows["ts"])]
    known = [time + 2 * DAY if row in late else time for row, time in enumerate(times)]
    rows = rows.set_column(rows.schema.get_field_index("ts"), "ts", pa.array(times))
    return rows.append_column("priced_at", pa.array(known)).append_column("price", pa.array(np.arange(200.0)))


@pytest.mark.parametrize("kind", ["time", "per_user_last", "random"])
def test_values_known_later_are_refused_where_time_says_what_is_held_out(
    kind, clicks, dataset_spec, job_spec, tmp_path
):
    job = job_spec(evaluation={"split": {"kind": kind}})
    described = {"features": FEATURES, "timestamp": "ts"}
    prepare(dataset_spec(table(clicks), **described), job, tmp_path / "good")
    dataset = dataset_spec(table(clicks, late=(17, 90, 91, 92)), **described)
    if kind == "random":
        prepare(dataset, job, tmp_path / "bad")
        return
    with pytest.raises(DataError) as raised:
        prepare(dataset, job, tmp_path / "bad")
    text = str(raised.value)
    assert "'price' in 4 rows" in text
    assert text.count("known 172800 s later") == 3
    assert "rows.parquet, row 17: ts 20" in text
    assert "row 92" not in text
    assert "take the value that was known at the row's time" in text


@pytest.mark.parametrize("late", [False, True])
def test_rows_of_a_joined_file_have_their_time(late, clicks, dataset_spec, job_spec, tmp_path):
    rows = clicks(200)
    items = sorted(set(rows["item"].to_pylist()))[1:]  # one item is in no row of the file
    first = {one["item"]: one["ts"] for one in sorted(rows.to_pylist(), key=lambda one: -one["ts"])}
    known = [first[item] + (1 if late and item == items[3] else 0) for item in items]
    pq.write_table(pa.table({"item": items, "brand": items, "seen": known}), tmp_path / "brands.parquet")
    join = {"uri": "brands.parquet", "on": "item", "column": "brand", "timestamp": "seen"}
    dataset = dataset_spec(rows, features={**FEATURES, "price": {"type": "id", "join": join}}, order="ts")
    job = job_spec(evaluation={"split": {"kind": "time"}})
    if not late:
        prepare(dataset, job, tmp_path / "data")
        return
    with pytest.raises(DataError, match=rf"'price' in 1 rows.*ts {known[3] - 1}, 'price' of {known[3]}"):
        prepare(dataset, job, tmp_path / "data")


def test_times_and_numbers_are_not_compared(clicks, dataset_spec, job_spec, tmp_path):
    rows = table(clicks).drop_columns("ts").append_column("ts", pa.array(np.arange(200)))
    job = job_spec(evaluation={"split": {"kind": "time"}})
    with pytest.raises(DataError, match=r"cannot be compared.*write both as times"):
        prepare(dataset_spec(rows, features=FEATURES, order="ts"), job, tmp_path / "data")


@pytest.mark.parametrize("units", [(1000, 1), (1, 1000)])
def test_times_of_other_units_are_not_compared(units, clicks, dataset_spec, job_spec, tmp_path):
    seconds = 1_772_323_200 + np.arange(200) * 3600
    rows = table(clicks).drop_columns(["ts", "priced_at"])
    rows = rows.append_column("ts", pa.array(seconds * units[0]))
    rows = rows.append_column("priced_at", pa.array((seconds + 86_400) * units[1]))
    job = job_spec(evaluation={"split": {"kind": "time"}})
    with pytest.raises(DataError, match=r"'price' is in \w+ since .* rows' time is in \w+, .*in one unit"):
        prepare(dataset_spec(rows, features=FEATURES, order="ts"), job, tmp_path / "data")


def test_a_time_needs_the_time_of_rows(clicks, dataset_spec):
    with pytest.raises(SpecError, match=r"features\.price\.timestamp: it is compared with the time of rows"):
        dataset_spec(table(clicks), features=FEATURES)
    derived = {"previous": "item", "by": "user", "order": "ts", "length": 3}
    history = {"type": "id_list", "derive": derived, "shares": "item", "timestamp": "ts"}
    with pytest.raises(SpecError, match="a history is always earlier"):
        dataset_spec(table(clicks), features={**FEATURES, "history": history}, timestamp="ts")
