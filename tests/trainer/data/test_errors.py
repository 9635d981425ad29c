"""Bad input: each case says what, where and the remedy, and leaves nothing half-written."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import small_disk
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.errors import DataAwayError, DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.source import Source

ALL_TRAIN = {"evaluation": {"split": {"validation": 0, "test": 0}}}


@pytest.fixture
def refused(dataset_spec, job_spec, tmp_path):
    """``refused(table or path, pattern, job=..., **dataset fields)``: prepare raises DataError and leaves nothing."""

    def check(source, pattern, job=None, **fields):
        dataset = dataset_spec(source, **fields)
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(DataError, match=pattern) as caught:
            prepare(dataset, job or job_spec(), tmp_path / "data")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert caught.value.where
        assert caught.value.remedy
        return caught.value

    return check


def test_path_is_not_there(refused, tmp_path):
    error = refused(tmp_path / "absent.parquet", "there is no such file or directory")
    assert error.where == str(tmp_path / "absent.parquet")


def test_missing_column(refused, clicks):
    refused(clicks(), r"rows\.parquet: no column 'itme' \(there are click, item, ts, user\)", features={"itme": {}})


def test_missing_column_in_a_later_file(refused, clicks, tmp_path):
    (tmp_path / "parts").mkdir()
    pq.write_table(clicks(), tmp_path / "parts" / "a.parquet")
    pq.write_table(clicks().drop_columns(["click"]), tmp_path / "parts" / "b.parquet")
    refused(tmp_path / "parts", r"b\.parquet: no column 'click'")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, float("nan"), 0.0], r"column 'click', row 1: NaN where the label must be \(fill the value in"),
        ([1, 0, None], r"column 'click', row 2: null where the label must be"),
        ([0, 1, 3], r"column 'click', row 2: the label is 3, neither 0 nor 1 \(correct it, or use a rule"),
        (["0", "1", "maybe"], r"column 'click', row 2: the label is 'maybe', and labels are numbers \(write it as"),
    ],
)
def test_bad_label(values, said, refused, clicks):
    refused(clicks(3).set_column(2, "click", pa.array(values)), said)


def test_bad_label_in_a_later_chunk_names_its_row(refused, clicks):
    values = np.zeros(400)
    values[333] = np.nan
    refused(clicks(400).set_column(2, "click", pa.array(values, from_pandas=False)), "column 'click', row 333: NaN")


def test_bad_value_under_a_rule(refused, clicks):
    table = clicks(4).append_column("rating", pa.array([5, 3, None, 1]))
    refused(
        table, r"column 'rating', row 2: null where the label \(rule 'rating >= 4'\)", label={"rule": "rating >= 4"}
    )


def test_null_order(refused, clicks, job_spec):
    table = clicks(4).set_column(3, "ts", pa.array([1, None, 3, 4]))
    job = job_spec(evaluation={"split": {"kind": "time"}})
    refused(table, "column 'ts', row 1: null where the order of rows must be", job, order="ts")


def test_empty_files(refused, clicks, tmp_path):
    (tmp_path / "zero.parquet").touch()
    refused(tmp_path / "zero.parquet", r"zero\.parquet: is empty \(0 bytes\)")
    refused(clicks(0), r"rows\.parquet: has no rows")
    (tmp_path / "header.csv").write_text("user,item,click\n")
    refused(tmp_path / "header.csv", r"header\.csv: has no rows")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", r"folder: holds no file that ends in \.parquet, \.pq, \.csv, ")


def test_truncated_parquet(refused, clicks, tmp_path):
    pq.write_table(clicks(), tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    refused(tmp_path / "cut.parquet", r"cut\.parquet: cannot be read as Parquet: .*truncated or not Parquet")


def test_parquet_damaged_in_the_middle(refused, clicks, tmp_path):
    """The footer is whole, so the file opens; a page is not."""
    pq.write_table(clicks(4000), tmp_path / "whole.parquet", compression="zstd")
    content = bytearray((tmp_path / "whole.parquet").read_bytes())
    content[60:600] = b"\xff" * 540
    (tmp_path / "damaged.parquet").write_bytes(bytes(content))
    refused(tmp_path / "damaged.parquet", r"damaged\.parquet: cannot be read as Parquet")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user,item,click\n1,2,0\n1,2\n", r"cannot be read as CSV: .*Expected 3 columns, got 2.*correct that row"),
        ("user,item\n1,2\n", "no column 'click'"),
        ("user,item,click\n1,2,yes\n1,3,no\n", "column 'click', row 0: the label is 'yes', and labels are numbers"),
        ("user,item,click\n1,2,0\n1,3,\n", "column 'click', row 1: null where the label must be"),
        ("user,item,click\n\xff,2,0\n".encode("latin-1"), "column 'user': is not UTF-8 text"),
    ],
)
def test_bad_csv(text, said, refused, tmp_path):
    (tmp_path / "rows.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(tmp_path / "rows.csv", said)


def test_neither_format(refused, tmp_path):
    (tmp_path / "rows.json").write_text("{}")
    refused(tmp_path / "rows.json", r"has none of the endings \.parquet, \.pq, \.csv, .*\(rename it to \.jsonl; an")


def test_mixed_formats(refused, clicks, tmp_path):
    (tmp_path / "parts").mkdir()
    pq.write_table(clicks(), tmp_path / "parts" / "a.parquet")
    (tmp_path / "parts" / "b.csv").write_text("user,item,click\n1,2,0\n")
    refused(tmp_path / "parts", "mixes Parquet and CSV")


def test_ids_of_a_type_that_is_none(refused, clicks):
    refused(clicks(3).set_column(0, "user", pa.array([1, 2, 3], pa.timestamp("s"))), "ids are integers or strings")
    refused(clicks(3).set_column(0, "user", pa.array([[1], [2], [3]])), r"holds lists \(set type: id_list\)")
    refused(clicks(3).set_column(0, "user", pa.array([2**63, 1, 2], pa.uint64())), "no 64-bit integer")


def test_one_table_of_integers_and_words(refused, clicks):
    table = clicks(3).append_column("similar", pa.array(["17", "x", "18"]))
    features = {"item": {"type": "id"}, "similar": {"type": "id", "shares": "item"}}
    refused(
        table,
        "column 'similar': has an id that is no 64-bit integer.*: .*make every id of this table",
        features=features,
    )


class TestJoin:
    FEATURES = {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "color": {"type": "id", "join": {"uri": "colors.parquet", "on": "item", "column": "color"}},
    }

    def test_file_missing(self, refused, clicks, tmp_path):
        error = refused(clicks(), "there is no such file", features=self.FEATURES)
        assert error.where == str(tmp_path / "colors.parquet")

    def test_column_missing(self, refused, clicks, tmp_path):
        pq.write_table(pa.table({"item": [1], "colour": [2]}), tmp_path / "colors.parquet")
        refused(clicks(), "no column 'color'", features=self.FEATURES)

    def test_duplicate_keys(self, refused, clicks, tmp_path):
        pq.write_table(pa.table({"item": [1, 5, 1, 5, 2], "color": list("abcde")}), tmp_path / "colors.parquet")
        said = r"column 'item': 2 join keys occur more than once, the first is 1 \(keep one row per key"
        refused(clicks(), said, features=self.FEATURES)

    def test_null_key(self, refused, clicks, tmp_path):
        pq.write_table(pa.table({"item": [1, None], "color": ["a", "b"]}), tmp_path / "colors.parquet")
        refused(clicks(), "column 'item', row 1: a join key is null", features=self.FEATURES)

    def test_no_rows(self, refused, clicks, tmp_path):
        pq.write_table(
            pa.table({"item": pa.array([], pa.int64()), "color": pa.array([], pa.string())}),
            tmp_path / "colors.parquet",
        )
        refused(clicks(), r"colors\.parquet: has no rows", features=self.FEATURES)


@pytest.mark.parametrize(("value", "model"), [(0, "dnn"), (1, "dnn"), (0, "bpr")])
def test_one_class_in_the_training_split(value, model, refused, clicks, job_spec):
    table = clicks().set_column(2, "click", pa.array(np.full(400, value)))
    said = "has no positive row, and BPR trains on positives" if model == "bpr" else rf"labels is {value} \("
    refused(table, said, job_spec(model={"kind": model}))


def test_no_training_rows(refused, clicks, job_spec):
    table = clicks(100).set_column(3, "ts", pa.array(np.zeros(100)))
    job = job_spec(evaluation={"split": {"kind": "time"}})
    said = r"'ts': a split by time leaves no rows for train and validation: times are from 0.0 to 0.0, and 100 of 100"
    refused(table, said, job, order="ts")  # equal times all fall on the later side


@pytest.mark.parametrize(
    ("times", "empty", "last"),
    [
        ([5] * 100, "train and validation: times are from 5 to 5", 100),
        ([5] * 30 + [9] * 70, "validation: times are from 5 to 9", 70),
        (["2026-01-05"] * 85 + ["2026-01-06T09:00:00"] * 15, "train: times are from 2026-01-05T00:00:00 to", 15),
        ([5] * 85 + [9] * 15, None, 0),
    ],
)
def test_equal_times_that_leave_a_split_empty(times, empty, last, refused, clicks, dataset_spec, job_spec, tmp_path):
    table = clicks(100).set_column(3, "ts", pa.array(times))
    if empty is None:
        share = job_spec(evaluation={"split": {"kind": "time", "validation": 0, "test": 0.1}})
        assert prepare(dataset_spec(table, order="ts"), share, tmp_path / "data").num_examples["test"] == 15
        return
    said = rf"a split by time leaves no rows for {empty}.*{last} of 100 rows have the last"
    refused(table, said, job_spec(evaluation={"split": {"kind": "time"}}), order="ts")


def test_one_time_is_told_where_the_order_of_files_decides(clicks, dataset_spec, job_spec, tmp_path):
    said: list[str] = []
    table = clicks(100).set_column(3, "ts", pa.array(["2026-01-05"] * 100))
    job = job_spec(evaluation={"split": {"kind": "per_user_last"}})
    prepare(dataset_spec(table, order="ts"), job, tmp_path / "data", log=said.append)
    assert any("every row has the ts 2026-01-05T00:00:00: per_user_last takes the rows as files" in one for one in said)


class TestWindow:
    def job(self, job_spec, start):
        return job_spec(dataset={"name": "clicks", "window": {"start": start, "days": 2}}, **ALL_TRAIN)

    def test_outside_the_folders(self, refused, clicks, job_spec, tmp_path):
        (tmp_path / "log" / "date=2026-01-05").mkdir(parents=True)
        pq.write_table(clicks(), tmp_path / "log" / "date=2026-01-05" / "a.parquet")
        said = r"no rows with date in \[2026-02-01, 2026-02-02\]; it holds 2026-01-05 to 2026-01-05 \(choose"
        refused(tmp_path / "log", said, self.job(job_spec, "2026-02-02"), partition="date")

    def test_outside_the_column(self, refused, clicks, job_spec):
        table = clicks(10).append_column("date", pa.array(["2026-01-05"] * 10))
        refused(table, "no rows with date in", self.job(job_spec, "2026-02-02"), partition="date")

    def test_template_not_filled_in(self, refused, clicks, job_spec):
        said = r"job 'job', dataset\.window: window\.start is \{firing_date\}, which a schedule fills in"
        refused(clicks(), said, self.job(job_spec, "{firing_date}"), partition="ts")

    @pytest.mark.parametrize("values", [["2026-01-05", "yesterday"], ["2026-01-05", None], [1.5, 2.5]])
    def test_partition_is_no_date(self, values, refused, clicks, job_spec):
        table = clicks(2).append_column("date", pa.array(values))
        refused(
            table,
            "column 'date', row [01]: ('.*' is not a date|has no date)",
            self.job(job_spec, "2026-01-05"),
            partition="date",
        )


class TestFeaturesThatReadNoColumn:
    """user or item by join: fine as inputs, but nothing to split by or to draw for."""

    @pytest.fixture
    def features(self, tmp_path):
        pq.write_table(
            pa.table({"item": list(range(-50, 400)), "owner": list(range(450))}), tmp_path / "owners.parquet"
        )
        owner = {"type": "id", "join": {"uri": "owners.parquet", "on": "item", "column": "owner"}}
        return {"item": {"type": "id"}, "user": owner}

    def test_per_user_last(self, features, refused, clicks, job_spec):
        job = job_spec(evaluation={"split": {"kind": "per_user_last"}})
        refused(
            clicks(),
            r"features\.user: .*per_user_last needs 'user' as a feature of type id",
            job,
            features=features,
            order="ts",
        )

    def test_negatives(self, features, refused, clicks):
        label = {"negatives": {"of": "item"}}
        refused(clicks(), r"label\.negatives needs 'user' as a feature of type id", features=features, label=label)

    def test_bpr(self, features, refused, clicks, job_spec):
        refused(
            clicks(), "bpr needs 'user' as a feature", job_spec(model={"kind": "bpr", "loss": "bpr"}), features=features
        )


def test_warm_start_with_other_kinds_of_ids(clicks, dataset_spec, job_spec, tmp_path):
    """Texts are hashed by their n-grams, whatever ids the warm start has."""
    table = clicks()
    dataset = dataset_spec(
        table.set_column(1, "item", table["item"].cast(pa.string())), features={"item": {"type": "text"}}
    )
    with pytest.raises(DataError, match=r"table 'item': the warm start's ids are string, this data's are int64"):
        prepare(dataset, job_spec(), tmp_path / "data", base_vocabulary={"item": IdMap(pa.array(["a"]))})
    assert not (tmp_path / "data").exists()


def test_a_failure_keeps_what_was_prepared_before(clicks, dataset_spec, job_spec, tmp_path):
    data = prepare(dataset_spec(clicks(300)), job_spec(), tmp_path / "data")
    with pytest.raises(DataError):
        prepare(dataset_spec(clicks(300).set_column(2, "click", pa.array([2] * 300))), job_spec(), tmp_path / "data")
    assert len(list(data.train_batches(0))) == data.steps_per_epoch
    assert {path.name for path in tmp_path.iterdir()} == {"data", "rows.parquet"}


def fill_the_disk(dataset, job, folder):
    with pytest.raises(DataError, match=r"cannot be written: No space left on device \(free disk space"):
        prepare(dataset, job, folder / "data")
    print(list(folder.iterdir()))


@pytest.mark.process
def test_disk_full(clicks, dataset_spec, job_spec, tmp_path):
    (tmp_path / "disk").mkdir()
    arguments = dataset_spec(clicks(20_000)), job_spec(), tmp_path / "disk"
    assert small_disk.run(tmp_path / "disk", "100k", tmp_path / "log.txt", fill_the_disk, *arguments) == (0, "[]\n")


def test_no_more_open_files(clicks, dataset_spec, tmp_path):
    """Nothing is said of the rows: a later attempt finds them."""
    source = Source(dataset_spec(clicks(10)).uri)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(DataAwayError, match="too many open files"):
            source.require([])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    source.require([])


def test_errors_cross_process_boundaries():
    error = pickle.loads(pickle.dumps(DataError("what", where="where", remedy="remedy")))
    assert (error.what, error.where, error.remedy, str(error)) == ("what", "where", "remedy", "where: what (remedy)")
    assert isinstance(error, ValueError)


@pytest.mark.process
def test_preparing_needs_no_torch():
    code = (
        "import sys, trainer.data.prepare.preparation, trainer.data.batches.prepared; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
