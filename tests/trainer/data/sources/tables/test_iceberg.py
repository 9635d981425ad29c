"""Tables of Iceberg, written by its own library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.source import Source

pytest.importorskip("pyiceberg.io.pyarrow", reason="pyiceberg is not installed")

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField, StructType

ROWS = {"user": [1, 2, 3, 4] * 5, "item": ["a", "b", "c", "d"] * 5, "click": [0, 1] * 10}


@pytest.fixture
def table(tmp_path):
    """A table of two files, of which one was rewritten, with a renamed and an added column."""
    catalog = SqlCatalog("catalog", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    rows = pa.table(ROWS)
    table = catalog.create_table("shop.clicks", schema=rows.schema)
    table.append(rows)
    with table.update_schema() as update:
        update.rename_column("item", "thing")
        update.add_column("price", LongType())
    table.append(pa.table({"user": [9], "thing": ["z"], "click": [1], "price": [7]}))
    yield table
    catalog.close()


def folder_of(table) -> Path:
    return Path(table.location().removeprefix("file://"))


def test_rows_are_those_of_the_table(table, dataset_spec, job_spec, tmp_path):
    before = Source(str(folder_of(table))).fingerprint_files()
    table.delete("user = 1")
    source = Source(str(folder_of(table)))
    assert len(list(folder_of(table).rglob("*.parquet"))) > len(source.files) == 2
    expected = table.scan().to_arrow().to_pylist()
    assert len(expected) == source.reader.num_rows() == 16
    columns = ["click", "thing", "price", "user"]
    chunks = list(source.stream(columns, 3))
    assert max(map(len, chunks)) == 3
    rows = [row for chunk in chunks for row in chunk.batch.to_pylist()]
    assert sorted(map(str, rows)) == sorted(str({name: row[name] for name in columns}) for row in expected)
    # Names are drawn: either file may be the first.
    in_first = sum(len(chunk) for chunk in source.stream_file(source.files[0], columns))
    rest = [row for chunk in source.stream(columns, 3, start=(0, 4)) for row in chunk.batch.to_pylist()]
    assert rest == rows[min(4, in_first) :]
    after = source.fingerprint_files()
    assert after != before
    with table.update_schema() as update:
        update.rename_column("thing", "item")
    assert Source(str(folder_of(table))).fingerprint_files() != after
    with table.update_schema() as update:
        update.rename_column("item", "thing")
    spec = dataset_spec(folder_of(table), features={"user": {}, "item": {"column": "thing"}})
    assert prepare(spec, job_spec(), tmp_path / "data").num_rows_read == 16


def add_deletes(table, content, rows, **settings):
    """Adds a file of deletes, as Spark and Flink write them beside the rows; this library deletes by writing anew."""
    path = folder_of(table) / "data" / f"{content.name}.parquet"
    pq.write_table(rows, path)
    file = DataFile.from_args(
        content=content, file_path=f"file://{path}", file_format=FileFormat.PARQUET, partition=Record(),
        record_count=len(rows), file_size_in_bytes=path.stat().st_size, **settings,
    )  # fmt: skip
    file.spec_id = 0
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as update:
        update.append_data_file(file)


def test_rows_that_a_file_of_deletes_names_are_left_out(table):
    data = next(task.file for task in table.scan().plan_files() if task.file.record_count == 20)
    numbers = {"file_path": "2147483546", "pos": "2147483545"}
    fields = [
        pa.field(name, type_, nullable=False, metadata={"PARQUET:field_id": numbers[name]})
        for name, type_ in {"file_path": pa.string(), "pos": pa.int64()}.items()
    ]
    places = pa.table({"file_path": [data.file_path] * 2, "pos": [0, 4]}, schema=pa.schema(fields))
    add_deletes(table, DataFileContent.POSITION_DELETES, places)
    source = Source(str(folder_of(table)))
    users = [user for chunk in source.stream(["user"]) for user in chunk.column("user").to_pylist()]
    assert sorted(users) == [1] * 3 + [2] * 5 + [3] * 5 + [4] * 5 + [9]
    assert source.reader.num_rows() is None
    add_deletes(table, DataFileContent.EQUALITY_DELETES, pa.table({"user": [3]}), equality_ids=[1])
    with pytest.raises(DataError, match=r"table of Iceberg: .*equality deletes.*write its rows as plain Parquet files"):
        Source(str(folder_of(table)))


def test_fields_of_structs_are_columns(tmp_path):
    catalog = SqlCatalog("catalog", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    shop = StructType(NestedField(2, "city", LongType()), NestedField(3, "size", LongType()))
    table = catalog.create_table("shop.nested", schema=Schema(NestedField(1, "shop", shop)))
    table.append(pa.table({"shop": [{"city": 1, "size": 2}, None]}))
    (chunk,) = Source(str(folder_of(table))).stream(["shop.size"])
    assert chunk.batch.to_pydict() == {"shop.size": [2, None]}
    catalog.close()


def test_a_table_that_was_moved_is_told(table, tmp_path):
    shutil.copytree(folder_of(table), tmp_path / "copy")
    with pytest.raises(DataError, match=f"its log names file://{tmp_path}/shop.*, which is not in the folder"):
        Source(str(tmp_path / "copy"))


def test_a_file_that_is_gone_is_told(table):
    next(folder_of(table).rglob("*.parquet")).unlink()
    with pytest.raises(DataError, match=r"its log names .*\.parquet, which is not in the folder"):
        Source(str(folder_of(table)))


def test_two_latest_versions_are_told_and_a_hint_decides(table):
    folder = folder_of(table) / "metadata"
    latest = max(folder.glob("*.metadata.json"))
    (folder / latest.name.replace("-", "-0", 1)).write_bytes(latest.read_bytes())
    with pytest.raises(DataError, match=f"and .*{latest.name}.* may be its latest .*remove what its catalog"):
        Source(str(folder.parent))
    (folder / "v1.metadata.json").write_bytes(latest.read_bytes())
    (folder / "version-hint.text").write_text("1\n")
    assert len(Source(str(folder.parent)).files) == 2


def test_a_table_without_rows(tmp_path):
    catalog = SqlCatalog("catalog", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.nothing", schema=pa.schema([("user", pa.int64())]))
    with pytest.raises(DataError, match="is a table of Iceberg without rows"):
        Source(str(folder_of(table)))
    catalog.close()
