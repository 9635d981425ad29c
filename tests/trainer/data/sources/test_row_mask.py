"""Which rows pass a filter: against Python's own reading of it, and as if the others were not in the file."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.row_mask import RowFilter
from trainer.data.sources.source import Source
from trainer.data.sources.times import read_times
from trainer.spec import parse_dataset

ROWS = pa.record_batch(
    {
        "n": pa.array([0, 1, 2, 3, None], pa.int32()),
        "x": pa.array([0.5, None, -1.0, float("nan"), 2.0]),
        "s": pa.array(["a", "b", None, "d", "it's"]),
        "b": pa.array([True, False, None, True, False]),
        "d": pa.array([datetime.date(2026, 1, day) for day in range(1, 6)]),
        "t": pa.array([datetime.datetime(2026, 1, day, 12) for day in range(1, 6)], pa.timestamp("ms", "UTC")),
    }
)


def passing(text: str, batch: pa.RecordBatch = ROWS) -> list[int]:
    found: list[int] = RowFilter(text).passing(batch, "rows.parquet").tolist()
    return found


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("t >= '2026-03-02'", [1, 2]),
        ("t < '2026-03-01T23:30:00.5-05:00'", [0]),
        ("'2026-03-02T04:30:00.5Z' <= t", [1, 2]),
        ("t in ('2026-03-01T23:30:00.5-05:00', '2027-01-01')", [1]),
        ("t != '2026-03-02T04:30:00.5'", [0, 2]),
        ("t <= '2026-03-01 00:00:00+01:00'", []),
        ("t is None", [3]),
    ],
)
@pytest.mark.parametrize("kind", ["text", "no zone", "UTC", "seconds", "another zone"])
def test_times_are_compared_as_instants_however_they_are_written(text, rows, kind):
    times = ["2026-03-01T00:00:00Z", "2026-03-01T23:30:00.5-05:00", "2026-03-03 01:00:00 UTC", None]
    column = pa.array(times)
    if kind != "text":
        types = {"no zone": pa.timestamp("ns"), "UTC": pa.timestamp("us", "UTC"), "seconds": pa.timestamp("ms")}
        column = pa.array(read_times(column).instants, mask=np.array([False, False, False, True]))
        column = column.cast(pa.timestamp("us")).cast(types.get(kind, pa.timestamp("us", "Asia/Tokyo")))
    assert passing(text, pa.record_batch({"t": column})) == rows


def test_text_that_is_no_time_is_compared_as_text():
    batch = pa.record_batch({"t": ["2026-03-01", "unknown", "2026-03-01T00:00:00Z", ""]})
    assert passing("t >= '2026-03-01'", batch) == [0, 1, 2]
    assert passing("t == 'unknown'", batch) == [1]
    assert passing("t in ('2026-03-01', 'unknown')", batch) == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("n >= 2", [2, 3]),
        ("not n >= 2", [0, 1]),  # null is neither
        ("n != 2", [0, 1, 3]),
        ("n is None or n == 0", [0, 4]),
        ("x is not None", [0, 2, 4]),  # NaN is no value
        ("x is None", [1, 3]),
        ("x != 2", [0, 2]),
        ("not x == 2", [0, 2]),
        ("not x < 0", [0, 4]),
        ("x not in (0.5, 2)", [2]),
        ("n >= x or x != 2", [0, 2]),
        ("s in ('a', \"it's\")", [0, 4]),
        ("s not in ('a', 'b')", [3, 4]),
        ("b == True", [0, 3]),
        ("b != True", [1, 4]),
        ("d >= '2026-01-04'", [3, 4]),
        ("t < '2026-01-02'", [0]),
        ("'2026-01-02' <= d < '2026-01-04'", [1, 2]),
        ("x < n", [2]),
        ("1 < n", [2, 3]),
    ],
)
def test_comparisons(text: str, rows: list[int]) -> None:
    assert passing(text) == rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n == 'two'", "column 'n'.*holds int32.*'two'"),
        ("s > 1", "column 's'.*holds string.*compares it with 1"),
        ("b == 1", "column 'b'.*holds bool"),
        ("n == True", "column 'n'.*holds int32"),
        ("d > 20260101", "column 'd'.*holds date32"),
        ("d > 'yesterday'", "column 'd'.*'yesterday'"),
        ("s == n", "column 's'.*compares it with column 'n'"),
    ],
)
def test_values_of_another_kind_are_told_with_file_and_column(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        passing(text)
    assert "rows.parquet" in str(refused.value)
    assert "quoted" in str(refused.value)


numbers = st.integers(-3, 3)
comparisons = st.builds(
    lambda name, sign, number: f"{name} {sign} {number}",
    st.sampled_from(["p", "q"]),
    st.sampled_from(["<", "<=", "==", "!=", ">", ">="]),
    numbers,
)
members = st.builds(
    lambda name, values: f"{name} in {values}", st.sampled_from(["p", "q"]), st.lists(numbers, min_size=1)
)
conditions = st.recursive(
    comparisons | members,
    lambda inner: (
        st.builds(lambda left, word, right: f"({left} {word} {right})", inner, st.sampled_from(["and", "or"]), inner)
        | st.builds(lambda one: f"not {one}", inner.map(lambda one: f"({one})"))
    ),
    max_leaves=6,
)


@given(text=conditions, rows=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_rows_without_nulls_pass_as_python_says(text: str, rows: list[tuple[int, int]]) -> None:
    batch = pa.record_batch({"p": [p for p, _ in rows], "q": [q for _, q in rows]})
    assert passing(text, batch) == [number for number, (p, q) in enumerate(rows) if eval(text, {"p": p, "q": q})]


# --- a source with a filter ------------------------------------------------------------------------------------------


def table(num_rows: int = 400) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "user": rng.integers(0, 20, num_rows),
            "item": rng.integers(0, 30, num_rows),
            "click": rng.integers(0, 2, num_rows),
            "country": rng.choice(["US", "CA", "DE"], num_rows),
            "stars": rng.integers(1, 6, num_rows),
        }
    )


def dataset(uri: Path, **fields: Any) -> Any:
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return parse_dataset(
        {"name": "rows", "uri": str(uri), "features": features, "label": {"column": "click"}, **fields}
    )


FILTER = "stars >= 3 and country != 'DE'"


def kept(rows: pa.Table) -> pa.Table:
    stars, country = rows.column("stars").to_numpy(), np.array(rows.column("country").to_pylist())
    return rows.filter(pa.array((stars >= 3) & (country != "DE")))


@pytest.mark.parametrize("file", ["rows.parquet", "rows.csv"])
def test_prepared_data_are_those_of_a_file_with_these_rows_alone(tmp_path: Path, small, file: str) -> None:
    import pyarrow.csv

    write = pq.write_table if file.endswith("parquet") else pyarrow.csv.write_csv
    write(table(), tmp_path / file)
    (tmp_path / "less").mkdir()
    write(kept(table()), tmp_path / "less" / file)
    job = small.job(sse={}, dataset={"name": "rows"})
    found = prepare(dataset(tmp_path / file, filter=FILTER), job, tmp_path / "filtered")
    alone = prepare(dataset(tmp_path / "less" / file), job, tmp_path / "alone")
    assert found.dataset_fingerprint != alone.dataset_fingerprint
    for part in sorted(path.relative_to(alone.directory) for path in alone.directory.rglob("*") if path.is_file()):
        if part.suffix not in (".json",) and "manifest" not in part.name:
            assert (found.directory / part).read_bytes() == (alone.directory / part).read_bytes(), part
    # The same rows are read anew where the filter is another one.
    other = prepare(dataset(tmp_path / file, filter="stars >= 3"), job, tmp_path / "filtered")
    assert PreparedData.open(other.directory).row_counts("item").sum() > alone.row_counts("item").sum()


def test_numbers_of_rows_and_places_are_those_of_the_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    pq.write_table(table(), rows)
    source = Source(str(rows), row_filter=FILTER)
    chunks = list(source.stream(["item"], chunk_rows=64))
    numbers = np.concatenate([chunk.rows for chunk in chunks])
    np.testing.assert_array_equal(table().column("item").to_numpy()[numbers], kept(table()).column("item").to_numpy())
    assert {tuple(chunk.batch.schema.names) for chunk in chunks} == {("item",)}
    again = list(source.stream(["item"], chunk_rows=64, start=(0, chunks[1].end)))
    np.testing.assert_array_equal(
        np.concatenate([chunk.rows for chunk in again]), np.concatenate([c.rows for c in chunks[2:]])
    )


def test_folders_give_columns_to_filter_by(tmp_path: Path) -> None:
    for country in ("US", "DE"):
        (tmp_path / f"country={country}").mkdir()
        pq.write_table(table(10).drop_columns(["country"]), tmp_path / f"country={country}" / "rows.parquet")
    source = Source(str(tmp_path), row_filter="country == 'DE' and stars > 0")
    assert {chunk.file.path.parent.name for chunk in source.stream(["item"])} == {"country=DE"}
    assert sum(len(chunk) for chunk in source.stream(["item"])) == 10


def test_no_row_and_no_column_are_told(tmp_path: Path, small) -> None:
    rows = tmp_path / "rows.parquet"
    pq.write_table(table(), rows)
    job = small.job(sse={}, dataset={"name": "rows"})
    with pytest.raises(DataError, match="no row passes the filter: stars > 9"):
        prepare(dataset(rows, filter="stars > 9"), job, tmp_path / "none")
    with pytest.raises(DataError, match="no column 'rating'"):
        prepare(dataset(rows, filter="rating > 9"), job, tmp_path / "absent")
