"""Tables of Delta Lake, written by its own library, or with a log by hand where that cannot write what others do."""

from __future__ import annotations

import base64
import json
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.infer import propose
from trainer.data.sources.source import Source

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")

ROWS = {
    "user": [1, 2, 3, 4] * 5,
    "item": ["a", "b", "c", "d"] * 5,
    "click": [0, 1] * 10,
    "day": ["2026-01-01", "2026-01-01", "2026-01-02", None] * 5,
}


def rows_of(source, columns):
    return sorted((row for chunk in source.stream(columns, 3) for row in chunk.batch.to_pylist()), key=str)


def test_rows_are_those_of_the_table(dataset_spec, job_spec, tmp_path):
    path = tmp_path / "rows"
    deltalake.write_deltalake(path, pa.table(ROWS), partition_by=["day"])
    before = Source(str(path)).fingerprint_files()
    deltalake.DeltaTable(path).delete("user = 1")
    more = {"user": [9], "item": ["z"], "click": [1], "day": ["2026-01-02"], "price": [1.5]}
    deltalake.write_deltalake(path, pa.table(more), mode="append", schema_mode="merge")
    source = Source(str(path))
    assert len(list(path.rglob("*.parquet"))) > len(source.files)
    expected = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    assert len(expected) == source.reader.num_rows() == 16
    assert rows_of(source, list(expected[0])) == sorted(expected, key=str)
    assert source.fingerprint_files() != before
    # A column that most files lack is null there, also where nothing else is read.
    assert sorted(str(row["price"]) for row in rows_of(source, ["price"])) == ["1.5"] + ["None"] * 15
    for number, file in enumerate(source.files):
        prices = [row["price"] for chunk in source.stream_file(file, ["price"]) for row in chunk.batch.to_pylist()]
        chunks = source.stream(["price"], 2, start=(number, 1))
        rest = [one for chunk in chunks if chunk.file == file for one in chunk.column("price").to_pylist()]
        assert rest == prices[1:]
    assert "left out" not in str(propose(path).notes)
    data = prepare(dataset_spec(path), job_spec(), tmp_path / "data")
    assert data.num_rows_read == 16


def test_types_that_were_widened_read(tmp_path):
    deltalake.write_deltalake(tmp_path, pa.table({"user": pa.array([1, 2], pa.int32())}))
    source = Source(str(tmp_path))
    source.require(["user"])
    assert source.column_type("user") == pa.int32()


@pytest.mark.parametrize("values", [["007", "7"], [5, -5], ["7", None]])
def test_partition_columns_have_the_type_that_the_table_declares(values, tmp_path):
    """Folders say less: text of digits is no integer, and two texts are two ids."""
    deltalake.write_deltalake(tmp_path, pa.table({"store": values, "user": [1, 2]}), partition_by=["store"])
    assert rows_of(Source(str(tmp_path)), ["store"]) == sorted(({"store": one} for one in values), key=str)


NUM_RECORDS = '{"numRecords": 10}'


def write_by_hand(path, *actions, features=(), configuration=None):
    """Write a log of one version over a file of ten rows."""
    (path / "_delta_log").mkdir()
    pq.write_table(pa.table({"user": range(10)}), path / "rows.parquet", row_group_size=4)
    names = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"} if configuration else {}
    fields = [{"name": "user", "type": "long", "nullable": True, "metadata": names}]
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": [*features],
        "writerFeatures": [*features],
    }
    metadata = {
        "id": "0", "format": {"provider": "parquet", "options": {}}, "partitionColumns": [],
        "schemaString": json.dumps({"type": "struct", "fields": fields}), "configuration": configuration or {},
    }  # fmt: skip
    log = [{"protocol": protocol}, {"metaData": metadata}, *actions]
    (path / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, log)))


def added(path="rows.parquet", **more):
    return {
        "add": {
            "path": path,
            "partitionValues": {},
            "size": 1,
            "modificationTime": 0,
            "dataChange": True,
            "stats": NUM_RECORDS,
            **more,
        }
    }


def test_rows_that_a_deletion_vector_marks_are_left_out(tmp_path):
    pyroaring = pytest.importorskip("pyroaring", reason="pyiceberg is not installed")
    deleted = [0, 5, 9]
    # Inline vectors: a number that marks them, and 64-bit bitmaps in the portable form; in Z85.
    content = struct.pack("<I", 1681511377) + pyroaring.BitMap64(deleted).serialize()
    vector = {"storageType": "i", "sizeInBytes": len(content), "cardinality": len(deleted)}
    vector["pathOrInlineDv"] = _z85(content + bytes(-len(content) % 4))
    write_by_hand(tmp_path, added(deletionVector=vector), features=["deletionVectors"])
    source = Source(str(tmp_path))
    kept = [1, 2, 3, 4, 6, 7, 8]
    assert [row["user"] for row in rows_of(source, ["user"])] == kept
    assert source.reader.num_rows() == 7
    for first_row in range(8):
        chunks = source.stream(["user"], 3, start=(0, first_row))
        assert [row for chunk in chunks for row in chunk.column("user").to_pylist()] == kept[first_row:]


def test_other_names_in_the_files_are_told(tmp_path):
    configuration = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
    write_by_hand(tmp_path, added(), features=["columnMapping"], configuration=configuration)
    with pytest.raises(DataError, match=r"other names in its files.*by name.*rewrite it without column mapping"):
        Source(str(tmp_path))


@pytest.mark.parametrize("path", ["gone.parquet", "../outside.parquet", "_hidden.parquet"])
def test_a_file_that_is_not_in_the_folder_is_not_read(path, tmp_path):
    folder = tmp_path / "table"
    folder.mkdir()
    for name in ("outside.parquet", "table/_hidden.parquet"):
        pq.write_table(pa.table({"user": [666]}), tmp_path / name)
    write_by_hand(folder, added(path))
    with pytest.raises(DataError, match=r"its log names .*, which is not in the folder"):
        Source(str(folder))


def test_a_table_without_rows(tmp_path):
    write_by_hand(tmp_path)
    with pytest.raises(DataError, match="is a table of Delta Lake without rows"):
        Source(str(tmp_path))


def _z85(content: bytes) -> str:
    """Return base 85 in the alphabet of ZeroMQ."""
    alphabet = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    python = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    return base64.b85encode(content).translate(bytes.maketrans(python, alphabet)).decode()
