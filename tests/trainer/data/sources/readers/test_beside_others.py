"""The same files read by pandas and polars have the same rows and values, in every format."""

from __future__ import annotations

import csv
import json

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.sources.source import Source

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('",;\t\n |[]{}#='), max_size=8)
ROWS = st.fixed_dictionaries(
    {
        "whole": st.none() | st.integers(-(2**63), 2**63 - 1),
        "float": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "text": st.none() | TEXTS.filter(bool),
        "date": st.none() | st.dates().map(str),
        "flag": st.none() | st.booleans(),
        "list": st.none() | st.lists(st.integers(-9, 9) | st.none(), max_size=3),
    }
)
# Ahead of all rows: a column has a value, and its texts are no numbers.
FIRST = {"whole": 7, "float": 0.5, "text": "a text", "date": "2026-01-31", "flag": True, "list": [1, None]}
SCHEMA = pa.schema(
    [
        ("whole", pa.int64()), ("float", pa.float64()), ("text", pa.string()), ("date", pa.string()),
        ("flag", pa.bool_()), ("list", pa.list_(pa.int64())),
    ]
)  # fmt: skip
DTYPES = {"whole": "Int64", "float": "Float64", "text": "string", "date": "string", "flag": "boolean"}


def plain(value):
    if isinstance(value, list):
        return [plain(one) for one in value]
    if value is None or value is pd.NA or value != value:
        return None
    return str(value)[:10] if hasattr(value, "isoformat") else value


def rows_of(frame):
    return [{name: plain(value) for name, value in row.items()} for row in frame]


def frame_of(rows):
    return pd.DataFrame({name: pd.array([row[name] for row in rows], dtype) for name, dtype in DTYPES.items()})


def by_csv(rows, path, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(DTYPES), delimiter=delimiter, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, "float": None if row["float"] is None else repr(row["float"])} for row in rows)


def by_pandas(rows, path):
    frame_of(rows).to_csv(path, index=False, quoting=csv.QUOTE_MINIMAL)


def lines_by_pandas(rows, path):
    # It would round the largest up to what no float is.
    rows = [{**row, "float": None if abs(row["float"] or 0) > 1e300 else row["float"]} for row in rows]
    frame = pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=object) for name in FIRST})
    frame.to_json(path, orient="records", lines=True, double_precision=15)


def lines(rows, path):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def table_of(rows):
    return pa.Table.from_pylist(rows, SCHEMA)


WRITERS = {
    "python.csv": by_csv,
    "python.tsv": lambda rows, path: by_csv(rows, path, "\t"),
    "pandas.csv": by_pandas,
    "pandas.csv.gz": by_pandas,
    "pandas.jsonl": lines_by_pandas,
    "python.jsonl": lines,
    "rows.parquet": lambda rows, path: pq.write_table(table_of(rows), path),
    "rows.feather": lambda rows, path: pa.feather.write_feather(table_of(rows), path),
    "rows.orc": lambda rows, path: pa.orc.write_table(table_of(rows), path),
}


def others_of(path, columns):
    """Yield the rows as pandas and as polars read them; pandas rounds floats of JSON, polars reads no ORC."""
    kind = path.name.split(".")[1]
    if kind == "jsonl":
        yield pl.read_ndjson(path, infer_schema_length=None).to_dicts()
    elif kind in ("csv", "tsv"):
        separator = "\t" if kind == "tsv" else ","
        frame = pd.read_csv(path, sep=separator, keep_default_na=False, na_values=[""], dtype=DTYPES)
        yield frame[columns].to_dict("records")
        schema = {"whole": pl.Int64, "float": pl.Float64, "text": pl.String, "date": pl.String, "flag": pl.String}
        rows = pl.read_csv(path, separator=separator, schema_overrides=schema).to_dicts()
        yield [{**row, "flag": {"True": True, "False": False}.get(row["flag"])} for row in rows]
    else:
        read = {"parquet": pd.read_parquet, "feather": pd.read_feather, "orc": pd.read_orc}[kind]
        yield pa.Table.from_pandas(read(path, dtype_backend="pyarrow")).to_pylist()
        if kind != "orc":
            yield {"parquet": pl.read_parquet, "feather": pl.read_ipc}[kind](path).to_dicts()


@pytest.mark.parametrize("name", WRITERS)
@given(rows=st.lists(ROWS, max_size=4))
def test_rows_are_those_of_pandas_and_polars(name, rows, tmp_path_factory):
    path, rows = tmp_path_factory.mktemp("rows") / name, [FIRST, *rows]
    WRITERS[name](rows, path)
    columns = list(DTYPES) if ".csv" in name or ".tsv" in name else list(FIRST)
    batches = [chunk.batch for chunk in Source(str(path), text=["text"]).stream(columns)]
    found = rows_of(row for batch in batches for row in batch.to_pylist())
    if name != "pandas.jsonl":  # which rounds floats
        assert found == rows_of({name: row[name] for name in columns} for row in rows)
    for others in others_of(path, columns):
        assert found == rows_of(others)
