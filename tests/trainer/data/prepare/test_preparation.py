"""prepare(): vocabulary from training alone, joins, tables shared, warm start, reuse, directories, windows, CSV."""

from __future__ import annotations

import csv
import datetime
import os
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.support import forked
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.errors import DataError
from trainer.data.prepare import arrays
from trainer.data.prepare.preparation import prepare
from trainer.data.sources import source as source_module
from trainer.spec import load_documents

SPLITS = ("train", "validation", "test")


def rows_of(data, read_split):
    return {split: read_split(data, split).to_pylist() for split in SPLITS}


def test_vocabulary_is_of_training_only(clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(200, items=150)
    data = prepare(dataset_spec(table), job_spec(), tmp_path / "data")
    train = read_split(data, "train")
    for name in ("user", "item"):
        vocabulary = data.vocabulary(name).to_pylist()
        assert vocabulary == sorted(set(train[name].to_pylist()))
        assert data.tables[name].num_rows == len(vocabulary) + 2
        assert None not in train[name].to_pylist()
        counts = data.row_counts(name)
        assert counts[:2].tolist() == [0, 0]
        assert counts[2:].tolist() == [train[name].to_pylist().count(id_) for id_ in vocabulary]
    test = read_split(data, "test")
    unknown = test["item"].null_count / len(test)
    assert unknown > 0
    assert data.unknown_share["item"]["test"] == unknown
    assert sum(data.num_examples.values()) == 200


def test_no_row_is_lost_or_changed(clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(300)
    data = prepare(dataset_spec(table), job_spec(), tmp_path / "data")
    found = [(r["user"], r["item"], r["label"]) for rows in rows_of(data, read_split).values() for r in rows]
    expected = [(r["user"], r["item"], r["click"]) for r in table.to_pylist()]
    known = [set(data.vocabulary(name).to_pylist()) for name in ("user", "item")]
    masked = [(u if u in known[0] else None, i if i in known[1] else None, label) for u, i, label in expected]
    key = str
    assert sorted(found, key=key) == sorted(masked, key=key)


def test_pairs_stay_on_one_side(clicks, dataset_spec, job_spec, tmp_path):
    """Also where the id itself is unknown: sides are compared on the raw rows, found by a column of their own."""
    table = clicks(2000, users=20, items=20)
    table = table.append_column("row", pa.array(range(2000)))
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "row": {"type": "id"}}
    job = job_spec(evaluation={"split": {"kind": "random", "validation": 0.3, "test": 0.3}})
    data = prepare(dataset_spec(table, features=features), job, tmp_path / "data")
    train_rows = set(data.vocabulary("row").to_pylist())
    pairs = {(r["user"], r["item"]) for r in table.to_pylist() if r["row"] in train_rows}
    others = {(r["user"], r["item"]) for r in table.to_pylist() if r["row"] not in train_rows}
    assert pairs
    assert others
    assert not pairs & others


def test_splits_do_not_depend_on_the_seed_or_the_order_of_rows(clicks, dataset_spec, job_spec, tmp_path):
    """A pair that one job tests on is not in another job's training split: warm starts do not leak."""
    table = clicks(400)
    first = prepare(dataset_spec(table), job_spec(seed=1), tmp_path / "first")
    shuffled = table.take(np.random.default_rng(2).permutation(400))
    second = prepare(dataset_spec(shuffled), job_spec(seed=2), tmp_path / "second")
    assert first.num_examples == second.num_examples
    assert first.vocabulary("item").equals(second.vocabulary("item"))


def test_string_ids_and_nulls(clicks, dataset_spec, job_spec, read_split, tmp_path):
    """A null id is row 1, like an unknown one, and is counted among the unknown."""
    table = clicks(300)
    names = [None if n % 17 == 0 else f"ïtem {value}" for n, value in enumerate(table["item"].to_pylist())]
    table = table.set_column(1, "item", pa.array(names).dictionary_encode())
    data = prepare(dataset_spec(table), job_spec(), tmp_path / "data")
    vocabulary = data.vocabulary("item").to_pylist()
    assert vocabulary == sorted(vocabulary, key=str.encode)
    assert None not in vocabulary
    assert data.row_counts("item")[1] == read_split(data, "train")["item"].null_count > 0
    assert data.row_keys("item").shape == (data.tables["item"].num_rows,)
    assert len(set(data.row_keys("item").tolist())) == data.tables["item"].num_rows


def test_row_keys_are_the_ids_own(clicks, dataset_spec, job_spec, tmp_path):
    """An id has the same key in any table of any run: its hash initial value follows it."""
    one = prepare(dataset_spec(clicks(300)), job_spec(), tmp_path / "one")
    other = prepare(dataset_spec(clicks(200, seed=9)), job_spec(), tmp_path / "other")
    keys = [dict(zip(d.vocabulary("item").to_pylist(), d.row_keys("item")[2:], strict=True)) for d in (one, other)]
    shared = keys[0].keys() & keys[1].keys()
    assert len(shared) > 10
    assert all(keys[0][id_] == keys[1][id_] for id_ in shared)


def test_warm_start_keeps_rows_and_appends_new_ids(clicks, dataset_spec, job_spec, read_split, tmp_path):
    base = pa.array([28, 999_999, 5, -50], pa.int64())
    dataset, job = dataset_spec(clicks(300)), job_spec()
    data = prepare(dataset, job, tmp_path / "warm", base_vocabulary={"item": IdMap(base)})
    cold = prepare(dataset, job, tmp_path / "cold")
    vocabulary = data.vocabulary("item").to_pylist()
    assert vocabulary[:4] == base.to_pylist()
    assert vocabulary[4:] == [id_ for id_ in cold.vocabulary("item").to_pylist() if id_ not in base.to_pylist()]
    assert rows_of(data, read_split)["train"] == rows_of(cold, read_split)["train"]
    assert data.row_counts("item")[3] == 0  # 999999 is not in this data
    assert data.fingerprint != cold.fingerprint
    assert data.vocabulary("user").equals(cold.vocabulary("user"))


@pytest.mark.parametrize("ids", [[1, 2, 3], ["a", "b|c", 'é,"x']])
def test_csv_equals_parquet(ids, clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(300)
    values = [None if n % 23 == 0 else ids[n % 3] for n in range(300)]
    when = [datetime.datetime(2026, 1, 1) + datetime.timedelta(hours=n) for n in table["ts"].to_pylist()]
    table = table.append_column("tag", pa.array(values)).append_column("when", pa.array(when, pa.timestamp("us")))
    features = {name: {"type": "id"} for name in ("user", "item", "tag")}
    fields = {"features": features, "timestamp": "when"}
    job = job_spec(evaluation={"split": {"kind": "time"}})
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    from_csv = prepare(dataset_spec(tmp_path / "rows.csv", **fields), job, tmp_path / "csv")
    from_parquet = prepare(dataset_spec(table, **fields), job, tmp_path / "parquet")
    assert rows_of(from_csv, read_split) == rows_of(from_parquet, read_split)
    assert from_csv.num_examples == from_parquet.num_examples
    assert from_csv.vocabulary("tag").equals(from_parquet.vocabulary("tag"))


def test_csv_types_are_found_over_the_whole_file(dataset_spec, job_spec, tmp_path, monkeypatch):
    """An id that is a word only in the last rows makes the column strings from the first row on."""
    monkeypatch.setattr("trainer.data.sources.readers.csv._BLOCK_BYTES", 64)
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "click"])
        writer.writerows([n % 7, n % 5 if n < 90 else "five", n % 2] for n in range(100))
    job = job_spec(evaluation={"split": {"validation": 0, "test": 0}})
    data = prepare(dataset_spec(tmp_path / "rows.csv"), job, tmp_path / "data")
    assert data.vocabulary("item").to_pylist() == ["0", "1", "2", "3", "4", "five"]
    assert data.vocabulary("user").to_pylist() == list(range(7))


def test_join_takes_last_first_and_all(clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(300)
    items = sorted(set(table["item"].to_pylist()))[3:]  # three items have no attributes
    lists = [list(range(item % 4)) if item % 5 else None for item in items]
    pq.write_table(
        pa.table({"item": pa.array(items, pa.int16()), "attrs": pa.array(lists)}), tmp_path / "attrs.parquet"
    )
    join = {"uri": "attrs.parquet", "on": "item", "column": "attrs"}
    features = {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "last": {"type": "id", "join": {**join, "take": "last"}},
        "first": {"type": "id", "join": {**join, "take": "first"}, "shares": "last"},
        "every": {"type": "id_list", "join": {**join, "take": "all"}},
    }
    job = job_spec(evaluation={"split": {"validation": 0, "test": 0}})
    data = prepare(dataset_spec(table, features=features), job, tmp_path / "data")
    by_item = dict(zip(items, lists, strict=True))
    for row in read_split(data, "train").to_pylist():
        attributes = by_item.get(row["item"]) or []
        assert row["every"] == attributes
        assert row["last"] == (attributes[-1] if attributes else None)
        assert row["first"] == (attributes[0] if attributes else None)
    assert data.tables["last"].features == ("last", "first")


def test_negatives_take_their_own_attributes(clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(200, users=20)
    items = sorted(set(table["item"].to_pylist()))
    pq.write_table(pa.table({"item": items, "color": [f"c{item}" for item in items]}), tmp_path / "colors.parquet")
    history = {"previous": "item", "by": "user", "order": "ts", "length": 2}
    features = {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "color": {"type": "id", "join": {"uri": "colors.parquet", "on": "item", "column": "color"}},
        "history": {"type": "id_list", "derive": history, "shares": "item"},
    }
    label = {"negatives": {"of": "item"}}
    job = job_spec(evaluation={"split": {"kind": "per_user_last", "validation": 0, "test": 0}})
    data = prepare(dataset_spec(table, features=features, label=label, order="ts"), job, tmp_path / "data")
    rows = read_split(data, "train").to_pylist()
    assert all(row["color"] == f"c{row['item']}" for row in rows)
    positives, negatives = rows[::2], rows[1::2]
    assert [row["history"] for row in positives] == [row["history"] for row in negatives]
    assert [row["user"] for row in positives] == [row["user"] for row in negatives]
    assert {row["label"] for row in positives} == {1}
    assert {row["label"] for row in negatives} == {0}


def test_history_reads_before_and_drops_short_ones(clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(120, users=10)
    derive = {"previous": "item", "by": "user", "order": "ts", "length": 4, "min_length": 1}
    features = {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "history": {"type": "id_list", "derive": derive, "shares": "item"},
    }
    job = job_spec(evaluation={"split": {"validation": 0, "test": 0}})
    data = prepare(dataset_spec(table, features=features), job, tmp_path / "data")
    expected = []
    for row in table.to_pylist():
        before = sorted(
            (r["ts"], r["item"]) for r in table.to_pylist() if r["user"] == row["user"] and r["ts"] < row["ts"]
        )
        if before:
            expected.append((row["user"], row["item"], [item for _, item in before[-4:]]))
    found = [(row["user"], row["item"], row["history"]) for row in read_split(data, "train").to_pylist()]
    assert found == expected
    assert data.num_rows_read - len(found) == len(set(table["user"].to_pylist()))


def test_lists_written_as_text(clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(60)
    text = [
        None if n % 7 == 0 else "" if n % 7 == 1 else "|".join(str(n % k) for k in range(1, n % 5 + 2))
        for n in range(60)
    ]
    features = {"user": {"type": "id"}, "genres": {"type": "id_list"}}
    table = table.append_column("genres", pa.array(text))
    job = job_spec(evaluation={"split": {"validation": 0, "test": 0}})
    data = prepare(dataset_spec(table, features=features), job, tmp_path / "data")
    assert read_split(data, "train")["genres"].to_pylist() == [value.split("|") if value else [] for value in text]


def partitioned(tmp_path, table):
    """The rows of day d (ts modulo 5) under date=2026-01-0d, in two files."""
    days = np.array(table["ts"]) % 5 + 1
    for day in range(1, 6):
        rows = table.filter(pa.array(days == day))
        folder = tmp_path / "log" / f"date=2026-01-{day:02d}"
        folder.mkdir(parents=True)
        pq.write_table(rows.slice(0, 20), folder / "a.parquet")
        pq.write_table(rows.slice(20), folder / "b.parquet")
    (tmp_path / "log" / "_SUCCESS").write_text("")
    (tmp_path / "log" / ".hidden.parquet").write_text("not Parquet")
    return tmp_path / "log", days


@pytest.mark.parametrize("column", ["folder", "date", "string", "integer", "timestamp", "time of a zone"])
def test_window_of_days(column, clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(300)
    path, days = partitioned(tmp_path, table)
    dates = [datetime.date(2026, 1, int(day)) for day in days]
    written = {
        "date": pa.array(dates),
        "string": pa.array([str(date) for date in dates]),
        "integer": pa.array([int(date.strftime("%Y%m%d")) for date in dates]),
        "time of a zone": pa.array([f"{datetime.date(2026, 1, int(day) + 1)}T01:00:00.5-05:00" for day in days]),
        "timestamp": pa.array([datetime.datetime(d.year, d.month, d.day, 23, 59) for d in dates], pa.timestamp("us")),
    }
    source = path if column == "folder" else table.append_column("date", written[column])
    job = job_spec(
        dataset={"name": "clicks", "window": {"start": "2026-01-04", "days": 2}},
        evaluation={"split": {"validation": 0, "test": 0}},
    )
    zone = {"column": "date", "timezone": "America/Los_Angeles"}
    partition = zone if column == "time of a zone" else "date"
    said: list[str] = []
    data = prepare(dataset_spec(source, partition=partition), job, tmp_path / "data", log=said.append)
    assert not any("have no rows" in line for line in said)
    expected = sorted(tuple(r.values())[:3] for r, day in zip(table.to_pylist(), days, strict=True) if day in (3, 4))
    assert sorted((r["user"], r["item"], r["label"]) for r in read_split(data, "train").to_pylist()) == expected


@pytest.mark.parametrize("column", ["folder", "string"])
@pytest.mark.parametrize(
    ("start", "shown"), [("2026-01-06", "2026-01-06"), ("2026-01-09", "2026-01-06, ..., 2026-01-09")]
)
def test_days_of_the_window_without_rows_are_named(column, start, shown, clicks, dataset_spec, job_spec, tmp_path):
    table = clicks(300)
    path, days = partitioned(tmp_path, table)
    source = path if column == "folder" else table.append_column("date", pa.array([f"2026-01-0{day}" for day in days]))
    job = job_spec(dataset={"name": "clicks", "window": {"start": start, "days": 5}})
    said: list[str] = []
    prepare(dataset_spec(source, partition="date"), job, tmp_path / "data", log=said.append)
    (line,) = [line for line in said if "have no rows" in line]
    first = f"2026-01-0{int(start[-1]) - 4}"
    assert line == f"{int(start[-1]) - 5} of 5 days of the window (date in [{first}, {start}]) have no rows: {shown}"


def test_a_folder_name_is_a_feature_too(clicks, dataset_spec, job_spec, read_split, tmp_path):
    path, _ = partitioned(tmp_path, clicks(300))
    features = {"user": {"type": "id"}, "date": {"type": "id"}}
    job = job_spec(evaluation={"split": {"validation": 0, "test": 0}})
    data = prepare(dataset_spec(path, features=features), job, tmp_path / "data")
    assert data.vocabulary("date").to_pylist() == [f"2026-01-0{day}" for day in range(1, 6)]
    assert data.num_examples["train"] == 300


def test_directory_equals_one_file(clicks, dataset_spec, job_spec, read_split, tmp_path):
    table = clicks(300)
    (tmp_path / "parts").mkdir()
    for number in range(3):
        pq.write_table(table.slice(number * 100, 100), tmp_path / "parts" / f"part-{number}.parquet")
    whole = prepare(dataset_spec(table), job_spec(), tmp_path / "whole")
    parts = prepare(dataset_spec(tmp_path / "parts"), job_spec(), tmp_path / "data")
    assert rows_of(parts, read_split) == rows_of(whole, read_split)


def test_chunks_change_nothing(clicks, dataset_spec, job_spec, read_split, tmp_path, monkeypatch):
    dataset = dataset_spec(clicks(300))
    whole = prepare(dataset, job_spec(), tmp_path / "whole")
    monkeypatch.setattr(source_module.Source.stream, "__defaults__", (11,))
    monkeypatch.setattr("trainer.data.prepare.examples.CHUNK_ROWS", 17)
    monkeypatch.setattr("trainer.data.prepare.table_rows._PIECE_ROWS", 23)
    monkeypatch.setattr("trainer.data.prepare.numbers._PIECE_VALUES", 23)
    chunks = prepare(dataset, job_spec(), tmp_path / "chunks")
    assert rows_of(chunks, read_split) == rows_of(whole, read_split)
    assert chunks.unknown_share == whole.unknown_share


def test_prepared_data_are_reused_until_something_changes(clicks, dataset_spec, job_spec, tmp_path):
    said: list[str] = []
    dataset = dataset_spec(clicks(300))
    first = prepare(dataset, job_spec(), tmp_path / "data", log=said.append)
    assert any(line.startswith("unknown ids of item: train 0.00%") for line in said)
    stamp = (tmp_path / "data" / "prepared.json").stat().st_ino
    prepare(dataset, job_spec(epochs=7), tmp_path / "data", log=said.append)
    assert said[-1].startswith("prepared data reused")
    assert (tmp_path / "data" / "prepared.json").stat().st_ino == stamp
    dataset = dataset_spec(clicks(301))
    second = prepare(dataset, job_spec(), tmp_path / "data", log=said.append)
    assert second.fingerprint != first.fingerprint
    assert second.dataset_fingerprint != first.dataset_fingerprint
    assert sum(second.num_examples.values()) == 301


def test_features_in_another_order_are_prepared_anew(clicks, dataset_spec, job_spec, tmp_path):
    """Batches have the order of the dataset, and towers and predictions have it too."""
    rows = dataset_spec(clicks(300)).uri
    for names in (("user", "item"), ("item", "user")):
        dataset = dataset_spec(rows, features={name: {"type": "id"} for name in names})
        data = prepare(dataset, job_spec(), tmp_path / "data")
        assert [key.name for key in data.keys] == list(names)


def test_lineage_fingerprint_follows_content_not_place(clicks, dataset_spec, job_spec, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    pq.write_table(clicks(300), tmp_path / "elsewhere" / "rows.parquet", row_group_size=97)
    here = prepare(dataset_spec(clicks(300)), job_spec(), tmp_path / "a")
    there = prepare(dataset_spec(tmp_path / "elsewhere" / "rows.parquet"), job_spec(seed=3), tmp_path / "b")
    assert here.dataset_fingerprint == there.dataset_fingerprint
    assert here.fingerprint != there.fingerprint


def test_nothing_is_left_beside_the_directory(clicks, dataset_spec, job_spec, tmp_path):
    leftover = tmp_path / "runs" / ".data.999999999.abc.preparing"
    leftover.mkdir(parents=True)
    prepare(dataset_spec(clicks(300)), job_spec(), tmp_path / "runs" / "data")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["data"]


def test_opening_what_was_not_prepared(tmp_path):
    with pytest.raises(DataError, match="holds no prepared data of this version"):
        PreparedData.open(tmp_path)


def test_reading_starts_no_thread_by_itself(clicks, dataset_spec, job_spec, tmp_path):
    data = prepare(dataset_spec(clicks(300)), job_spec(), tmp_path / "data")
    before = threading.active_count()
    data.train_batches(0)
    assert threading.active_count() == before


def test_float_ids_are_integers_with_holes(clicks, dataset_spec, job_spec, read_split, tmp_path):
    """What pandas makes of an integer column with missing values."""
    table = clicks(100)
    floats = [float("nan") if n % 9 == 0 else float(item) for n, item in enumerate(table["item"].to_pylist())]
    job = job_spec(evaluation={"split": {"validation": 0, "test": 0}})
    data = prepare(dataset_spec(table.set_column(1, "item", pa.array(floats))), job, tmp_path / "data")
    expected = [None if n % 9 == 0 else item for n, item in enumerate(table["item"].to_pylist())]
    assert read_split(data, "train")["item"].to_pylist() == expected


def test_columns_of_one_table_take_its_first_features_type(clicks, dataset_spec, job_spec, read_split, tmp_path):
    """Items as integers, a list of similar ones as text: one table of integers."""
    table = clicks(60)
    items = table["item"].to_pylist()
    similar = ["|".join(str(item) for item in items[n : n + n % 3]) for n in range(60)]
    features = {"similar": {"type": "id_list", "shares": "item"}, "user": {"type": "id"}, "item": {"type": "id"}}
    job = job_spec(evaluation={"split": {"validation": 0, "test": 0}})
    data = prepare(
        dataset_spec(table.append_column("similar", pa.array(similar)), features=features), job, tmp_path / "d"
    )
    assert pa.types.is_int64(data.vocabulary("item").type)
    assert read_split(data, "train")["similar"].to_pylist() == [items[n : n + n % 3] for n in range(60)]


def prepare_slowly(dataset, job, folder):
    append = arrays.Appender.append

    def slow(self, values):
        print("writing", flush=True)
        time.sleep(0.2)
        append(self, values)

    arrays.Appender.append = slow
    prepare(dataset, job, folder)


@pytest.mark.process
def test_killed_while_preparing(clicks, dataset_spec, job_spec, tmp_path, tmp_path_factory):
    """SIGKILL in the middle leaves no directory; the next run cleans up and makes it whole."""
    dataset, job = dataset_spec(clicks(300)), job_spec()
    log = tmp_path_factory.mktemp("log") / "log.txt"
    process = forked.start(prepare_slowly, dataset, job, tmp_path / "data", log=log)
    while not (log.exists() and log.read_text().count("writing\n") >= 5):
        assert process.exitcode is None, log.read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert any(path.name.endswith(".preparing") for path in tmp_path.iterdir())
    assert PreparedData.fingerprint_of(tmp_path / "data") is None
    data = prepare(dataset, job, tmp_path / "data")
    assert sum(data.num_examples.values()) == 300
    assert not any(path.name.endswith(".preparing") for path in tmp_path.iterdir())


def test_all_is_on_disk_before_the_rename_shows_it(clicks, dataset_spec, job_spec, tmp_path, monkeypatch):
    """What the power going off right after the rename may find: every file and folder was fsynced, and then it."""
    dataset = dataset_spec(clicks(300))
    synced, at_rename = set(), []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor):
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(source, target):
        unsynced = [path for path in [Path(source), *Path(source).rglob("*")] if path not in synced]
        rename(source, target)  # raises where there is nothing old to be put aside
        if Path(target) == tmp_path / "data":
            at_rename.extend(unsynced)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    prepare(dataset, job_spec(), tmp_path / "data")
    assert synced
    assert at_rename == []
    assert tmp_path in synced


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).resolve().parents[4] / "examples").glob("*.yaml")), ids=lambda p: p.stem
)
def test_examples_are_valid(path):
    dataset, job = load_documents(path)
    assert job.against(dataset) is job


def test_window_start_without_quotes(tmp_path):
    """YAML makes a date of it."""
    text = "{name: j, spec_version: 1, model: {kind: dnn}, dataset: {name: d, window: {start: 2026-01-31}}}"
    (tmp_path / "job.yaml").write_text(text)
    assert load_documents(tmp_path / "job.yaml")[1].dataset.window.start == "2026-01-31"
