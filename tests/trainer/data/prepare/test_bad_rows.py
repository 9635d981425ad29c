"""Bad rows: left out where some may be, counted by reason, written down, and too many of them are an error."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.columns.row_encoder import RowEncoder
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import BAD_ROWS, prepare
from trainer.inference.parquet_scoring import chunk_of
from trainer.spec import Feature, parse_dataset, parse_job

NUM_ROWS = 200
REASONS = {
    "no label": 1,
    "label that is neither 0 nor 1": 2,
    "no time": 1,
    "no finite number": 2,
    "missing": 2,
    "weights that do not match the ids of the list": 1,
}


def write(path):
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, NUM_ROWS).astype(float).tolist()
    label[3], label[10], label[11] = None, 2.0, -1.0
    pos: list[int | None] = list(range(NUM_ROWS))
    pos[20] = None
    price = rng.random(NUM_ROWS).tolist()
    price[30], price[31] = float("inf"), float("-inf")
    price[11] = float("inf")  # its row is bad already
    price[40] = None
    user: list[int | None] = rng.integers(0, 9, NUM_ROWS).tolist()
    user[50] = None
    weights = [[1.0]] * NUM_ROWS
    weights[60] = [1.0, 2.0]
    columns = {
        "user": user,
        "item": rng.integers(0, 20, NUM_ROWS),
        "price": price,
        "tags": [[1]] * NUM_ROWS,
        "w": weights,
        "pos": pos,
        "click": label,
    }
    pq.write_table(pa.table(columns), path)
    return path


def specs(path, max_bad_rows=None, **changes):
    dataset = {
        "name": "rows",
        "uri": str(path),
        "features": {
            "user": {"type": "id", "missing": "error"},
            "item": {"type": "id"},
            "price": {"type": "dense", "missing": "error"},
            "tags": {"type": "id_list", "weights": "w"},
        },
        "label": {"column": "click"},
        "order": "pos",
    }
    job = {
        "name": "rows",
        "dataset": {"name": "rows"},
        "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8]},
        "evaluation": {"split": {"kind": "time"}},
    }
    limit = {} if max_bad_rows is None else {"max_bad_rows": max_bad_rows}
    return parse_dataset(dataset | limit | changes), parse_job(job)


def test_they_are_left_out_counted_and_written_down(tmp_path):
    path, said = write(tmp_path / "rows.parquet"), []
    data = prepare(*specs(path, 0.05), tmp_path / "run" / "data", log=said.append)
    assert data.bad_rows == REASONS
    assert sum(data.num_examples.values()) == NUM_ROWS - 9 == data.num_rows_read
    assert any("9 of 200 rows (4.50%) are bad: " in line and BAD_ROWS in line for line in said)
    found = pq.read_table(tmp_path / "run" / BAD_ROWS).to_pylist()
    assert sorted(row["row"] for row in found) == [3, 10, 11, 20, 30, 31, 40, 50, 60]
    assert {"row": 10, "column": "click", "value": "2.0", "reason": "label that is neither 0 nor 1"}.items() <= next(
        row for row in found if row["row"] == 10
    ).items()
    assert all(row["file"] == str(path) for row in found)
    # The rows that are left are those of a file without the bad ones.
    kept = pq.read_table(path).take(sorted(set(range(NUM_ROWS)) - {row["row"] for row in found}))
    pq.write_table(kept, tmp_path / "clean.parquet")
    clean = prepare(*specs(tmp_path / "clean.parquet"), tmp_path / "clean")
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(data.labels(split), clean.labels(split))
        np.testing.assert_array_equal(data.numbers(split), clean.numbers(split))
        np.testing.assert_array_equal(data.column(split, data.keys[1]), clean.column(split, clean.keys[1]))


def test_more_than_the_limit_fail_with_examples(tmp_path):
    path = write(tmp_path / "rows.parquet")
    with pytest.raises(DataError) as caught:
        prepare(*specs(path, 0.04), tmp_path / "run" / "data")
    said = str(caught.value)
    assert "9 of 200 rows (4.50%) are bad" in said
    assert "max_bad_rows allows 4.00%" in said
    assert (
        "label that is neither 0 nor 1 (rows.parquet, row 10: click = 2.0, rows.parquet, row 11: click = -1.0)" in said
    )
    assert not (tmp_path / "run" / "data").exists()
    assert len(pq.read_table(tmp_path / "run" / BAD_ROWS)) == 9


def test_without_a_limit_the_first_one_fails(tmp_path):
    with pytest.raises(
        DataError, match=r"column 'user', row 50: the id is missing, and the feature says missing: error"
    ):
        prepare(*specs(write(tmp_path / "rows.parquet")), tmp_path / "data")
    assert not (tmp_path / BAD_ROWS).exists()


@pytest.mark.parametrize("missing", [None, np.nan])
def test_a_missing_id_that_must_be_there(tmp_path, missing):
    rows = pq.read_table(write(tmp_path / "rows.parquet")).slice(45, 10).drop(["price"])
    user = [float(one) if one is not None else missing for one in rows["user"].to_pylist()]
    rows = rows.set_column(0, "user", pa.array(user))
    pq.write_table(rows, tmp_path / "rows.parquet")
    features = {"user": {"type": "id", "missing": "error"}, "item": {"type": "id"}}
    with pytest.raises(DataError, match=r"column 'user', row 5: the id is missing"):
        prepare(*specs(tmp_path / "rows.parquet", features=features), tmp_path / "data")
    row_encoder = RowEncoder(
        specs(tmp_path / "rows.parquet", features=features)[0], {"user": Feature(missing="error")}, {}
    )
    with pytest.raises(DataError, match=r"column 'user', row 5: the id is missing"):
        row_encoder.encode(chunk_of(rows))


def test_clean_rows_leave_no_file(tmp_path):
    rows = pq.read_table(write(tmp_path / "rows.parquet")).slice(100)
    pq.write_table(rows, tmp_path / "rows.parquet")
    data = prepare(*specs(tmp_path / "rows.parquet", 0.0), tmp_path / "data")
    assert data.bad_rows == {}
    assert not (tmp_path / BAD_ROWS).exists()


def test_text_among_numbers_of_a_csv_file(tmp_path):
    """One value that is no number makes the column text: the others are numbers all the same."""
    lines = ["user,item,price,pos,click"] + [f"{n % 9},{n % 20},{n / 7},{n},{n % 2}" for n in range(100)]
    lines[8], lines[20] = "1,2,cheap,7,1", "1,2,0.5,19,yes"
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "price": {"type": "dense"}}
    data = prepare(*specs(tmp_path / "rows.csv", 0.02, features=features), tmp_path / "run" / "data")
    assert data.bad_rows == {"no finite number": 1, "label that is no number": 1}
    assert sum(data.num_examples.values()) == 98
    found = pq.read_table(tmp_path / "run" / BAD_ROWS).to_pylist()
    assert sorted((row["row"], row["value"]) for row in found) == [(7, "cheap"), (19, "yes")]


def test_ids_are_text_in_all_files_where_one_has_text(tmp_path):
    folder = tmp_path / "days"
    folder.mkdir()
    features = {"item": {"type": "id"}}
    first = {"item": list(range(50)), "click": [0, 1] * 25, "pos": list(range(50))}
    second = {"item": [str(n) for n in range(48)] + ["x", None], "click": [0, 1] * 25, "pos": list(range(50, 100))}
    pq.write_table(pa.table(first), folder / "a.parquet")
    pq.write_table(pa.table(second), folder / "b.parquet")
    data = prepare(*specs(folder, 0.5, features=features), tmp_path / "run" / "data")
    assert data.bad_rows == {}
    assert sum(data.num_examples.values()) == 100
    assert set(data.vocabulary("item").to_pylist()) <= {*map(str, range(50)), "x"}


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        pytest.param("1", "7.0", id="fraction as text"),
        pytest.param("1", "07", id="zero in front"),
        pytest.param(1.0, 2.0**53, id="float that stands for several integers"),
        pytest.param("1|2", "1|undefined", id="one of a list as text"),
        pytest.param([1.0, None], [1.0, 1.5], id="one of a list of floats"),
        pytest.param(["1"], ["x"], id="one of a list of text"),
    ],
)
def test_ids_of_an_integer_table_that_cannot_be_read_as_such(good, bad, tmp_path):
    rows = {"item": list(range(50)), "other": [good] * 49 + [bad], "click": [0, 1] * 25, "pos": list(range(50))}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    kind = "id_list" if isinstance(good, list) or "|" in str(good) else "id"
    features = {"item": {"type": "id"}, "other": {"type": kind, "shares": "item"}}
    data = prepare(*specs(tmp_path / "rows.parquet", 0.1, features=features), tmp_path / "run" / "data")
    assert data.bad_rows == {"no integer id": 1}
    assert sum(data.num_examples.values()) == 49


def test_a_text_in_brackets_is_no_broken_list(tmp_path):
    rows = pq.read_table(write(tmp_path / "rows.parquet")).slice(100)
    titles = ["[new] red shoes [sale]", "[two words]", "a|b", None] * 25
    pq.write_table(rows.append_column("title", pa.array(titles)), tmp_path / "rows.parquet")
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "title": {"type": "text"}}
    data = prepare(*specs(tmp_path / "rows.parquet", 0.0, features=features), tmp_path / "data")
    assert sum(data.num_examples.values()) == 100
