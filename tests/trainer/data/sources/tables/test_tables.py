"""Folders whose log says which files hold rows: refused without the format's library, told where the log is unclear."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.datasets.paths import data_files
from trainer.data.errors import DataError
from trainer.data.sources.infer import infer
from trainer.data.sources.source import Source
from trainer.data.sources.tables.registry import TABLE_FORMATS

LOGS = {"Delta Lake": "_delta_log/00000000000000000000.json", "Iceberg": "metadata/v1.metadata.json"}
every_format = pytest.mark.parametrize("table", TABLE_FORMATS, ids=lambda table: table.extra)


def write_table(folder, table):
    (folder / LOGS[table.name]).parent.mkdir(parents=True)
    (folder / LOGS[table.name]).write_text("{}\n")
    pq.write_table(pa.table({"user": [1, 2], "click": [0, 1]}), folder / "rows.parquet")


@every_format
def test_a_table_is_not_read_by_its_files(table, tmp_path, monkeypatch):
    write_table(tmp_path, table)
    monkeypatch.setitem(sys.modules, table.module, None)
    says = rf"{tmp_path}: is a table of {table.name}, whose log .*pip install 'evenkeel\[{table.extra}\]', or write its"
    with pytest.raises(DataError, match=says):
        infer(tmp_path)


@every_format
def test_a_table_further_down_is_named(table, tmp_path):
    write_table(tmp_path / "warehouse" / "clicks", table)
    with pytest.raises(DataError, match=f"holds a table of {table.name} in warehouse/clicks .*name the folder of the"):
        Source(str(tmp_path))


@every_format
def test_a_table_in_object_storage_is_refused(table):
    with pytest.raises(
        DataError, match=f"s3://rows/clicks: a table of {table.name} can only be read from a folder of this machine"
    ):
        table.snapshot("s3://rows/clicks", (), {})


@every_format
def test_the_log_is_among_the_files_that_a_registration_examines(table, tmp_path):
    write_table(tmp_path, table)
    assert [str(one.relative_to(tmp_path)) for one in data_files(tmp_path)] == sorted(
        [LOGS[table.name], "rows.parquet"]
    )


@every_format
def test_a_damaged_log_is_told(table, tmp_path):
    pytest.importorskip(table.module, reason=f"{table.module.partition('.')[0]} is not installed")
    write_table(tmp_path, table)
    with pytest.raises(
        DataError, match=f"cannot be read as a table of {table.name}: .*check that the table is complete"
    ):
        Source(str(tmp_path))


def test_a_file_of_a_table_is_a_file(tmp_path):
    write_table(tmp_path, TABLE_FORMATS[0])
    assert Source(str(tmp_path / "rows.parquet")).column_names() == ["user", "click"]
