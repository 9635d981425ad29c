"""JSON Lines: one object in each line, read in blocks of whole lines. Torch-free.

A column is int64, float64, bool, string, or a list of such values: the narrowest type that every value in every file
fits. A key that a line of the file lacks, and an empty text, are null in that row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.json

from trainer.data.errors import DataError
from trainer.data.sources.id_types import are_mixed
from trainer.data.sources.locations import FilePath
from trainer.data.sources.readers.base import BOM, TextReader, require_utf_8, text_of, with_compressions
from trainer.data.sources.types import element_type

_BLOCK_BYTES = 1 << 24
_ROW = re.compile(r"in row (\d+)$")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
# In JSON, two quotes side by side are an empty text unless a backslash escapes the first; a key has a colon behind it.
_EMPTY = re.compile(rb'""(?<!\\"")(?=\s*[,\]}])')
MAX_DEPTH = 256
_AS_BRACES = bytes.maketrans(b"[]", b"{}")
_OTHER_BYTES = bytes(set(range(256)) - set(b'"[]{}'))


class JsonLinesReader(TextReader):
    name = "JSON Lines"
    suffixes = with_compressions(".jsonl", ".ndjson")
    remedy = "correct that row: one JSON object in each line, values of one type in each column, UTF-8"

    def read_schema(self, path: FilePath) -> pa.Schema:
        """Return the columns of the file's first block."""
        first = next((table.schema for table in self._tables(path)), pa.schema([]))
        return pa.schema([(field.name, _untimed(field.type)) for field in first])

    def types_in(self, path: FilePath, columns: list[str]) -> dict[str, pa.DataType]:
        types: dict[str, pa.DataType] = {}
        for table in self._tables(path):
            self.merge(types, {field.name: _untimed(field.type) for field in table.schema if field.name in columns})
        return types

    def as_text(self, kind: pa.DataType) -> pa.DataType:
        """Return the type unchanged unless it is null: only quoted values can be read as text, numbers cannot."""
        if pa.types.is_list(kind):
            return pa.list_(self.as_text(kind.value_type))
        return pa.string() if pa.types.is_null(kind) else kind

    def common_type(self, left: pa.DataType, right: pa.DataType, name: str) -> pa.DataType | None:
        if pa.types.is_list(left) and pa.types.is_list(right):
            values = self.common_type(left.value_type, right.value_type, name)
            return None if values is None else pa.list_(values)
        if pa.types.is_struct(left) and pa.types.is_struct(right):
            return self._common_struct(left, right, name)
        common = super().common_type(left, right, name)
        # Numbers are read as text only in columns of ids that also have text.
        quoted = all(pa.types.is_null(kind) or pa.types.is_string(kind) for kind in (left, right))
        is_mixed = name in self.mixed and are_mixed(left, right)
        return None if common == pa.string() and not quoted and not is_mixed else common

    def _common_struct(self, left: pa.DataType, right: pa.DataType, name: str) -> pa.DataType | None:
        """Return a struct with the fields of both; a field that an object lacks is null."""
        fields: dict[str, pa.DataType] = {field.name: field.type for field in left}
        for field in right:
            common = self.common_type(fields.get(field.name, pa.null()), field.type, f"{name}.{field.name}")
            if common is None:
                return None
            fields[field.name] = common
        return pa.struct(list(fields.items()))

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([(name, self.column_type(name)) for name in columns])
        for table in self._tables(path, schema):
            yield from table.combine_chunks().to_batches(chunk_rows)

    def _tables(self, path: FilePath, schema: pa.Schema | None = None) -> Iterator[pa.Table]:
        """Yield a table for each block; with a schema, tables of only its columns."""
        first_row = 0
        for block in self._blocks(path):
            # Arrow parses recursively: deep nesting would overflow the stack and kill the process.
            if depth_of(block) > MAX_DEPTH:
                raise self.unreadable(path, f"lists or objects are nested more than {MAX_DEPTH} deep")
            self._require_utf_8(block, path, first_row)
            block = with_nulls(block)
            try:
                table = read_json(block, self._schema_of(block, schema))
            except pa.ArrowException as error:
                raise self.unreadable(path, _with_row_of_file(str(error).splitlines()[0], first_row)) from None
            first_row += table.num_rows
            yield table

    def _require_utf_8(self, block: bytes, path: FilePath, first_row: int) -> None:
        """Check that the block is UTF-8, which Arrow does not check: nobody could write other ids as text."""
        try:
            block.decode("utf-8")
        except UnicodeDecodeError as error:
            row = first_row + block.count(b"\n", 0, error.start)
            raise self.unreadable(path, f"row {row} is not UTF-8: iconv -f LATIN1 -t UTF-8 FILE") from None

    def _schema_of(self, block: bytes, schema: pa.Schema | None) -> pa.Schema | None:
        """Return the types in which to read a block; a column of text and integers has the type that the block has."""
        if schema is None or not self.mixed:
            return schema
        there = read_json(block, None).schema
        found = {field.name: _untimed(field.type) for field in there}
        return pa.schema([(one.name, self._in_block(one.type, found.get(one.name), one.name)) for one in schema])

    def _in_block(self, wanted: pa.DataType, there: pa.DataType | None, name: str) -> pa.DataType:
        if there is not None and pa.types.is_struct(wanted) and pa.types.is_struct(there):
            found = {field.name: field.type for field in there}
            fields = [(one.name, self._in_block(one.type, found.get(one.name), f"{name}.{one.name}")) for one in wanted]
            return pa.struct(fields)
        return wanted if there is None or name not in self.mixed or pa.types.is_null(element_type(there)) else there

    def _blocks(self, path: FilePath) -> Iterator[bytes]:
        """Yield whole lines, about ``_BLOCK_BYTES`` of them at a time."""
        rest = b""
        with text_of(path) as stream:
            block = stream.read(_BLOCK_BYTES).removeprefix(BOM)
            require_utf_8(block, path)
            if block.lstrip().startswith(b"["):
                remedy = "write one object in each line: jq -c '.[]' FILE > rows.jsonl"
                raise DataError("is one JSON array, not JSON Lines", where=str(path), remedy=remedy)
            while block:
                lines, newline, tail = block.rpartition(b"\n")
                if newline:
                    lines, rest = rest + lines + newline, tail
                    if lines.strip():
                        yield lines
                elif len(rest) + len(tail) > _BLOCK_BYTES:
                    raise self.unreadable(path, f"a line is longer than {_BLOCK_BYTES:,} bytes")
                else:
                    rest += tail
                block = stream.read(_BLOCK_BYTES)
        if rest.strip():
            yield rest


def _untimed(kind: pa.DataType) -> pa.DataType:
    """Return text instead of the timestamps that Arrow guesses: only text tells times with a zone from others."""
    if pa.types.is_list(kind):
        return pa.list_(_untimed(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _untimed(field.type)) for field in kind])
    return pa.string() if pa.types.is_timestamp(kind) else kind


def read_json(block: bytes, schema: pa.Schema | None) -> pa.Table:
    """Read lines with only the columns of a schema; None: with all columns, in the types that Arrow finds."""
    # One byte more than the block, whose last line may have no end.
    read = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    others = "infer" if schema is None else "ignore"
    parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
    return pa.json.read_json(pa.BufferReader(block), read, parse)


def with_nulls(block: bytes) -> bytes:
    """Return JSON with null instead of empty texts, so that a column of numbers may have empty texts too."""
    return _EMPTY.sub(b"null", block)


def depth_of(block: bytes) -> int:
    """Return the depth of nested lists and objects, as far as the block is JSON."""
    text = _ESCAPE.sub(b"", block) if b"\\" in block else block
    marks = np.frombuffer(text.translate(_AS_BRACES, _OTHER_BYTES), np.int8)
    outside = np.cumsum(marks == ord('"'), dtype=np.int8) % 2 == 0
    steps = ((marks == ord("{")) & outside).astype(np.int8) - ((marks == ord("}")) & outside)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _with_row_of_file(message: str, first_row: int) -> str:
    """Return Arrow's message, which counts rows from the block on, with the row of the file."""
    return _ROW.sub(lambda row: f"in row {first_row + int(row[1])}", message)
