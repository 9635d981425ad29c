"""Vectors from columns of lists: what they are, what is missing and what is bad, against plain Python."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.data.conftest import click_table
from trainer.data.columns.vectors import Vector, arranged, require_lists, vector_problems
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.source import Source
from trainer.spec import parse_dataset, parse_job

NUMBERS = st.none() | st.floats(width=32) | st.just(math.nan) | st.just(math.inf)
ROWS = st.lists(st.none() | st.lists(NUMBERS, max_size=4) | st.lists(st.floats(-9, 9), min_size=2, max_size=2))


@given(ROWS, st.integers(0, 2))
def test_what_is_missing_and_bad_is_that_of_plain_python(rows, skipped):
    array = pa.array(rows, pa.list_(pa.float64())).slice(min(skipped, len(rows)))
    rows = rows[skipped:]
    found, missing, bad = vector_problems(Vector("v", "v", 2), array)
    for row, vector, is_missing, is_bad in zip(rows, found.tolist(), missing, bad, strict=True):
        finite = row is not None and len(row) == 2 and all(x is not None and math.isfinite(x) for x in row)
        assert is_missing == (row is None)
        assert is_bad == (row is not None and not finite)
        assert vector == ([float(np.float32(x)) for x in row] if finite else [0.0, 0.0])


def test_fixed_lists_integers_and_columns_of_nothing():
    vector = Vector("v", "v", 2)
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    found, missing, bad = vector_problems(vector, fixed.slice(1))
    assert found.tolist() == [[0, 0], [3, 4]]
    assert missing.tolist() == [True, False]
    assert not bad.any()
    assert vector_problems(vector, pa.nulls(2))[1].all()
    assert vector_problems(vector, pa.array(["a", None]))[2].tolist() == [True, False]
    assert vector_problems(vector, pa.array([[1e39, 0.0]]))[2].all(), "beyond float32"


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (pa.list_(pa.float32(), 3), r"holds vectors of 3 numbers, and feature 'v' has dim: 2 \(set dim: 3"),
        (pa.float64(), "holds double, and a vector is a list of numbers"),
        (pa.date32(), "holds date32.*, and a vector is a list"),
    ],
)
def test_columns_that_hold_no_such_vectors_are_refused(type_, message):
    with pytest.raises(DataError, match=message):
        require_lists(type_, Vector("v", "v", 2), "rows, column 'v'")
    require_lists(pa.list_(pa.float32()), Vector("v", "v", 2), "rows")


def test_normalized_vectors_have_length_1_and_zeros_stay(tmp_path):
    pq.write_table(pa.table({"v": [[3.0, 4.0], None, [0.0, 0.0], [1e30, 0.0]]}), tmp_path / "rows.parquet")
    (chunk,) = Source(str(tmp_path / "rows.parquet")).stream(["v"])
    found = Vector("v", "v", 2, normalize=True).read(chunk)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0], [0, 0], [1, 0]], rtol=1e-6)


def test_the_block_of_a_batch_has_what_models_read_as_numbers_first():
    vectors = [Vector("a", "a", 2), Vector("b", "b", 1, projected=False), Vector("c", "c", 1, of_item=True)]
    vectors.append(Vector("d", "d", 2, projected=False, of_item=True))
    values = {"a": 7, "b": 2, "c": 8, "d": 4}
    blocks = {one.name: np.full((1, one.dim), values[one.name]) for one in vectors}
    found = arranged(np.ones((1, 1)), np.full((1, 1), 3.0), vectors, blocks)
    assert found.tolist() == [[1, 2, 3, 4, 4, 7, 7, 8]]
    assert found.dtype == np.float32


# --- bad rows --------------------------------------------------------------------------------------------------------


def prepared(folder, column, *, files=1, **fields):
    limit = fields.pop("max_bad_rows", None)
    table = click_table(90).append_column("v", column)
    (folder / "rows").mkdir()
    for number in range(files):
        part = table.slice(number * 90 // files, 90 // files)
        pq.write_table(part, folder / "rows" / f"{number}.parquet")
    features = {"user": {}, "item": {}, "v": {"type": "vector", "dim": 2, **fields}}
    document = {"name": "clicks", "uri": str(folder / "rows"), "features": features, "label": {"column": "click"}}
    dataset = parse_dataset(document | ({} if limit is None else {"max_bad_rows": limit}))
    job = parse_job({"name": "job", "dataset": {"name": "clicks"}, "model": {"kind": "dnn"}, "batch_size": 16})
    return prepare(dataset, job, folder / "data")


GOOD = [0.5, 1.0]


@pytest.mark.parametrize(
    ("bad", "fields", "message"),
    [
        ([1.0], {}, r"row 7: feature 'v' is \[1.0\]: no vector of 2 finite numbers \(correct it, remove the row"),
        ([1.0, math.nan], {}, r"feature 'v' is \[1.0, nan\]: no vector of 2 finite numbers"),
        ([1.0, math.inf], {}, r"feature 'v' is \[1.0, inf\]: no vector"),
        ([1.0, None], {}, r"feature 'v' is \[1.0, None\]: no vector"),
        ([1.0] * 9, {}, r"feature 'v' is \[1.0, 1.0, 1.0, ...\] of 9: no vector of 2"),
        (None, {"missing": "error"}, "feature 'v' is None: missing"),
    ],
)
def test_a_bad_vector_fails_the_job_or_is_left_out(tmp_path, bad, fields, message):
    column = pa.array([bad if row == 7 else GOOD for row in range(90)], pa.list_(pa.float64()))
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, column, **fields)
    (tmp_path / "again").mkdir()
    data = prepared(tmp_path / "again", column, max_bad_rows=0.05, **fields)
    assert sum(data.num_examples.values()) == 89
    reason = "missing" if bad is None else "no vector of 2 finite numbers"
    assert data.bad_rows == {reason: 1}
    rows = pq.read_table(tmp_path / "again" / "bad_rows.parquet").to_pylist()
    assert [(row["row"], row["column"], row["reason"]) for row in rows] == [(7, "v", reason)]


def test_a_later_file_of_another_length_is_refused_by_its_name(tmp_path):
    column = pa.array([GOOD if row < 45 else [*GOOD, 2.0] for row in range(90)])
    with pytest.raises(DataError, match=r"1.parquet.*row 0.*no vector of 2 finite numbers"):
        prepared(tmp_path, column, files=2)
    (tmp_path / "again").mkdir()
    with pytest.raises(DataError, match=r"45 of 90 rows \(50.00%\) are bad: no vector of 2 finite numbers 45"):
        prepared(tmp_path / "again", column, files=2, max_bad_rows=0.1)


def test_missing_vectors_are_zeros(tmp_path):
    column = pa.array([None if row % 3 else GOOD for row in range(90)], pa.list_(pa.float32(), 2))
    data = prepared(tmp_path, column)
    (vector,) = data.vectors
    rows = np.concatenate([data.row_vectors(split, vector) for split in data.num_examples])
    assert sorted(map(tuple, rows.tolist())) == sorted([(0.0, 0.0)] * 60 + [tuple(GOOD)] * 30)
