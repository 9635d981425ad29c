"""CSV files as streaming record batches with one type per column over all files. Torch-free.

A column is int64, float64, a date or timestamp, bool or string: the narrowest that every value of every file fits. Ids
are text unless each is written as its integer (trainer.data.sources.id_types). Only the empty field is null; strings
such as NA are strings. Lists are written as ``a|b|c`` (see
trainer.data.columns.values). Fields are separated by the first of ``,``, ``;``, tab and ``|`` that the header
has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import pyarrow as pa
import pyarrow.csv

from trainer.data.errors import DataError
from trainer.data.sources.id_types import WrittenIds
from trainer.data.sources.locations import FilePath
from trainer.data.sources.readers.base import TextReader, text_of, with_compressions

_BLOCK_BYTES = 1 << 24
_HEADER_BYTES = 1 << 16
_DELIMITERS = (",", ";", "\t", "|")
_QUOTED = re.compile(rb'"[^"]*"')
_FAILED_COLUMN = re.compile(r"In CSV column #(\d+)")


class CsvReader(TextReader):
    name = "CSV"
    suffixes = with_compressions(".csv")
    remedy = (
        "correct that row: a header line, separated by commas, semicolons, tabs or pipes like the rows, the same "
        "number of fields in each row, UTF-8"
    )
    delimiter: ClassVar[str | None] = None
    """What separates fields; None: what the header has."""

    def __init__(self, paths: Sequence[FilePath]):
        super().__init__(paths)
        self._delimiters: dict[FilePath, str] = {}
        self._plain: set[str] = set()
        """Columns of ids in which a value is plainly text."""

    def read_schema(self, path: FilePath) -> pa.Schema:
        """Return the columns of the header, with the types of the first block."""
        return self._open(path, None, {}).schema

    def types_in(self, path: FilePath, columns: list[str]) -> dict[str, pa.DataType]:
        """Read the file once, and once more for each column in which a value does not fit the type taken so far."""
        ids = [name for name in columns if name in self.ids and name not in self.text]
        types: dict[str, pa.DataType] = dict.fromkeys(ids, pa.string())
        while True:
            written = {name: WrittenIds() for name in ids}
            try:
                batches = self._open(path, columns, types)
                types = {field.name: field.type for field in batches.schema}
                for batch in batches:
                    for name, one in written.items():
                        one.add(batch.column(name))
                break
            except pa.ArrowInvalid as error:
                failed = self._failed_column(error, path)
                if failed is None or failed not in types:
                    raise
                if pa.types.is_string(types[failed]):
                    raise _not_utf8(path, failed) from None
                types[failed] = _wider(types[failed])
        for name, kind in types.items():
            if pa.types.is_binary(kind):
                raise _not_utf8(path, name)
        for name, one in written.items():
            types[name] = one.type
            self._plain |= set() if one.is_number_like else {name}
            if one.example is not None:
                self.number_like.setdefault(name, one.example)
        for name in self._plain:
            self.number_like.pop(name, None)
        return types

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        for batch in self._open(path, columns, {name: self.column_type(name) for name in columns}):
            for start in range(0, batch.num_rows, chunk_rows):
                yield batch.slice(start, chunk_rows)

    def delimiter_of(self, path: FilePath) -> str:
        """Return what separates the fields of a file."""
        if self.delimiter is not None:
            return self.delimiter
        if path not in self._delimiters:
            with text_of(path) as stream:
                header = stream.read(_HEADER_BYTES).lstrip(b"\xef\xbb\xbf\r\n").partition(b"\n")[0]
            outside_quotes = _QUOTED.sub(b"", header)
            self._delimiters[path] = next((one for one in _DELIMITERS if one.encode() in outside_quotes), ",")
        return self._delimiters[path]

    def _failed_column(self, error: Exception, path: FilePath) -> str | None:
        match = _FAILED_COLUMN.search(str(error))
        return self.schema(path).names[int(match[1])] if match else None

    def _open(
        self, path: FilePath, columns: Sequence[str] | None, types: Mapping[str, pa.DataType]
    ) -> pa.csv.CSVStreamingReader:
        return pa.csv.open_csv(
            text_of(path),
            read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            parse_options=pa.csv.ParseOptions(delimiter=self.delimiter_of(path), newlines_in_values=False),
            convert_options=pa.csv.ConvertOptions(
                include_columns=columns,
                column_types={name: kind for name, kind in types.items() if not pa.types.is_null(kind)},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )


def _not_utf8(path: FilePath, column: str) -> DataError:
    return DataError("is not UTF-8 text", where=f"{path}, column '{column}'", remedy="write the file in UTF-8")


def _wider(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_integer(kind) else pa.string()
