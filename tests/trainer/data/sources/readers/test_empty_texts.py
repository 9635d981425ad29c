"""An empty text and null are one in every format: in ids, lists, numbers, times, filters, keys of joins and folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.data.sources.readers.test_formats import WRITERS, contents, write_lines
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.infer import infer
from trainer.data.sources.readers import json_lines
from trainer.data.sources.source import Source
from trainer.inference.parquet_scoring import chunk_of

EVERY_FORMAT = {"rows.parquet": pq.write_table, **WRITERS}
every_format = pytest.mark.parametrize("name", EVERY_FORMAT)


def rows_of(missing: str | None, num_rows: int = 300) -> pa.Table:
    """Rows of text in which every eighth or so value is ``missing``, in each column but the item's."""
    generator = np.random.default_rng(5)

    def some(values: list[str], every: int) -> list[str | None]:
        return [missing if row % every == 1 else value for row, value in enumerate(values)]

    tags = [[f"t{one}" for one in generator.integers(0, 9, 3)] for _ in range(num_rows)]
    return pa.table(
        {
            "user": some([f"u{one}" for one in generator.integers(0, 30, num_rows)], 8),
            "item": generator.integers(0, 40, num_rows),
            "brand": some([f"b{one}" for one in generator.integers(0, 5, num_rows)], 9),
            "tags": [one if row % 7 else [one[0], missing, one[2]] for row, one in enumerate(tags)],
            "price": some([str(one / 4) for one in generator.integers(0, 9, num_rows)], 11),
            "ts": some([f"2026-01-{1 + row // 30:02d}T00:00:{row % 30:02d}" for row in range(num_rows)], 50),
            "shop": some(["s"] * num_rows, 40),
            "click": generator.integers(0, 2, num_rows),
        }
    )


def write(table: pa.Table, path: Path) -> None:
    """Write rows; of a list in CSV null elements are empty, as in text of pipes."""
    if ".csv" in path.name or ".tsv" in path.name:
        tags = [[one or "" for one in row] for row in table["tags"].to_pylist()]
        table = table.set_column(table.column_names.index("tags"), "tags", pa.array(tags))
    EVERY_FORMAT[path.name](table, path)


@every_format
def test_rows_with_empty_texts_are_prepared_as_rows_with_nulls(name, dataset_spec, job_spec, tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 1000)
    fields = {
        "features": {
            "user": {"type": "id"},
            "item": {"type": "id"},
            "tags": {"type": "id_list"},
            "price": {"type": "dense"},
            "maker": {"type": "id", "join": {"uri": "PATH", "on": "brand", "column": "maker"}},
        },
        "filter": "shop is not None",
        "timestamp": "ts",
        "max_bad_rows": 0.5,
    }
    job = job_spec(model={"kind": "dcnv2"})
    brands = {"brand": [f"b{one}" for one in range(5)], "maker": ["m", "", "n", "o", ""]}
    pq.write_table(pa.table({**brands, "maker": [one or None for one in brands["maker"]]}), tmp_path / "nulls.parquet")
    fields["features"]["maker"]["join"]["uri"] = str(tmp_path / "nulls.parquet")
    expected = prepare(dataset_spec(rows_of(None), **fields), job, tmp_path / "expected")
    write(rows_of(""), tmp_path / name)
    (tmp_path / "joined").mkdir()
    EVERY_FORMAT[name](pa.table(brands), tmp_path / "joined" / name)
    fields["features"]["maker"]["join"]["uri"] = str(tmp_path / "joined" / name)
    data = prepare(dataset_spec(tmp_path / name, **fields), job, tmp_path / "data")
    for table in expected.tables:
        assert data.vocabulary(table).equals(expected.vocabulary(table))
    assert expected.vocabulary("maker").to_pylist() == ["m", "n", "o"]
    assert contents(data) == contents(expected)


@every_format
def test_the_proposal_is_that_of_nulls(name, tmp_path):
    (tmp_path / "nulls").mkdir()
    (tmp_path / "empty").mkdir()
    write(rows_of(None), tmp_path / "nulls" / name)
    write(rows_of(""), tmp_path / "empty" / name)
    nulls, empty = (infer(tmp_path / one / name) for one in ("nulls", "empty"))
    assert {**empty, "uri": ""} == {**nulls, "uri": ""}


@every_format
def test_values_are_read_as_null(name, tmp_path):
    table = pa.table({"user": ["a", "", None, " "], "same": ["", "", "", None]})
    EVERY_FORMAT[name](table, tmp_path / name)
    source = Source(str(tmp_path / name))
    assert source.column_names() == ["user", "same"]
    batches = [chunk.batch.to_pydict() for chunk in source.stream(["user", "same"], 2)]
    assert [value for batch in batches for value in batch["user"]] == ["a", None, None, " "]
    assert [value for batch in batches for value in batch["same"]] == [None] * 4


def test_empty_elements_of_every_type_of_list(tmp_path):
    values = [["a", ""], None, [""], ["", "b"], []]
    for number, type_ in enumerate((pa.list_(pa.string()), pa.large_list(pa.large_string()))):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"tags": pa.array(values, type_)}), path)
        chunks = list(Source(str(path)).stream(["tags"], 2))
        read = [row for chunk in chunks for row in chunk.column("tags").to_pylist()]
        assert read == [["a", None], None, [None], [None, "b"], []]
    pairs = pa.array([["a", ""], ["b", "c"]], pa.list_(pa.string(), 2))
    assert chunk_of(pa.table({"tags": pairs})).column("tags").to_pylist() == [["a", None], ["b", "c"]]
    coded = pa.array(["a", "", None]).dictionary_encode()
    assert chunk_of(pa.table({"user": coded})).column("user").to_pylist() == ["a", None, None]


def test_only_whole_texts_of_json_are_empty(tmp_path):
    """Quotes that are escaped, names of keys and texts that hold brackets stay as they are."""
    rows = [
        {"user": 'say ""', "n": 1, "": "x", "l": ["", 'a"', "b"]},
        {"user": '"",', "n": "", "": "", "l": [""]},
        {"user": ': ""', "n": 2.5, "": "y", "l": []},
        {"user": "\\", "n": None, "": "z", "l": ["\\"]},
    ]
    for separators in ((", ", ": "), (",", ":")):
        text = "".join(json.dumps(row, separators=separators) + "\n" for row in rows)
        (tmp_path / "rows.jsonl").write_text(text)
        (chunk,) = Source(str(tmp_path / "rows.jsonl")).stream(["user", "n", "", "l"])
        assert chunk.batch.to_pydict() == {
            "user": ['say ""', '"",', ': ""', "\\"],
            "n": [1, None, 2.5, None],
            "": ["x", None, "y", "z"],
            "l": [[None, 'a"', "b"], [None], [], ["\\"]],
        }


def test_an_empty_value_of_a_folder_is_null(tmp_path):
    for country in ("", "de"):
        (tmp_path / f"country={country}").mkdir()
        write_lines(pa.table({"item": [1]}), tmp_path / f"country={country}" / "rows.jsonl")
    chunks = list(Source(str(tmp_path)).stream(["country"]))
    assert [chunk.column("country").to_pylist() for chunk in chunks] == [[None], ["de"]]
