"""CSV files as streaming record batches with one type per column over all files. Torch-free.

A column's type is int64, float64, a date or timestamp, bool or string: the narrowest that fits every value of every
file. Ids are text unless each is written as an integer is, without leading zeros (trainer.data.sources.id_types).
Only the empty field is null; strings such as NA stay strings. Lists are written as ``a|b|c`` or ``[a, b, c]``
(trainer.data.columns.text_lists). Fields are separated by the first of ``,``, ``;``, tab and ``|`` that the header
contains. A quoted field may hold line breaks.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trainer.data.errors import DataError
from trainer.data.sources.id_types import WrittenIds
from trainer.data.sources.locations import FilePath
from trainer.data.sources.readers.base import BOM, TextReader, require_utf_8, text_of, with_compressions

_BLOCK_BYTES = 1 << 24
_TAIL_BYTES = 1 << 16
_FAILED_COLUMN = re.compile(r"In CSV column #(\d+)")
_FAILED_ROW = re.compile(r"Row #(\d+)")


class CsvReader(TextReader):
    name = "CSV"
    suffixes = with_compressions(".csv")
    remedy = (
        "correct that row: a header line, separated by commas, semicolons, tabs or pipes like the rows, the same "
        "number of fields in each row, UTF-8"
    )
    delimiter: ClassVar[str | None] = None
    """Separator of fields; None: it is found from the header of each file."""

    def __init__(self, paths: Sequence[FilePath]):
        super().__init__(paths)
        self._heads: dict[FilePath, Head] = {}
        self._plain: set[str] = set()
        """Id columns with text, in some file, that cannot be read as a number."""

    def read_schema(self, path: FilePath) -> pa.Schema:
        """Return the columns of the header, with the types that Arrow finds in the first block of rows."""
        return self._open(path, None, {}).schema

    def types_in(self, path: FilePath, columns: list[str]) -> dict[str, pa.DataType]:
        """Return the narrowest types that fit the values of one file.

        The file is read once, and again from its beginning each time that a value does not fit its column's type.

        Raises:
            DataError: a column is not UTF-8, or a quote is not closed.
        """
        ids = [name for name in columns if name in self.ids and name not in self.text]
        types: dict[str, pa.DataType] = dict.fromkeys(ids, pa.string())
        while True:
            written = {name: WrittenIds() for name in ids}
            try:
                text = _CountedText(text_of(path))
                batches = self._open(path, columns, types, text)
                types = {field.name: field.type for field in batches.schema}
                rows = 0
                for batch in batches:
                    self._require_no_names(batch, ids, path, rows)
                    rows += batch.num_rows
                    for name, one in written.items():
                        one.add(batch.column(name))
                break
            except pa.ArrowInvalid as error:
                match = _FAILED_COLUMN.search(str(error))
                failed = self.schema(path).names[int(match[1])] if match else None
                if failed is None or failed not in types:
                    raise
                if pa.types.is_string(types[failed]):
                    raise _not_utf8(path, failed) from None
                types[failed] = _wider(types[failed])
        for name, kind in types.items():
            if pa.types.is_binary(kind):
                raise _not_utf8(path, name)
        # More lines than rows: there are blank lines, line breaks in quotes, or an open quote that swallowed rows.
        has_breaks = text.num_lines > rows + 1 + self._head(path).skipped_lines
        is_cut = any(field[1] is None for field in self._quoted(path).finditer(b"\n" + text.last_line, 1))
        if (has_breaks or is_cut) and (why := self._open_quote(path)):
            raise super().unreadable(path, why)
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

    def unreadable(self, path: FilePath, why: str) -> DataError:
        """Return the error for a file that cannot be read.

        An unclosed quote in the file replaces the reason ``why``, because it causes such errors.
        """
        with contextlib.suppress(pa.ArrowException, OSError):
            why = self._open_quote(path) or why
        # Arrow counts rows from 1, and counts the header as a row.
        return super().unreadable(path, _FAILED_ROW.sub(lambda row: f"row {int(row[1]) - 2}", why))

    def _head(self, path: FilePath) -> Head:
        if path not in self._heads:
            self._heads[path] = head_of(path, self.delimiter)
        return self._heads[path]

    def _open(
        self, path: FilePath, columns: Sequence[str] | None, types: Mapping[str, pa.DataType], text: _Text | None = None
    ) -> pa.csv.CSVStreamingReader:
        head = self._head(path)
        return pa.csv.open_csv(
            pa.PythonFile(text or _Text(text_of(path)), "r"),
            read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False, skip_rows=head.skipped_lines),
            parse_options=pa.csv.ParseOptions(delimiter=head.delimiter, newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                include_columns=columns,
                column_types={name: kind for name, kind in types.items() if not pa.types.is_null(kind)},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )

    def _require_no_names(self, batch: pa.RecordBatch, ids: Sequence[str], path: FilePath, first_row: int) -> None:
        """Check that no row repeats the names of the id columns, as the headers within concatenated files do."""
        if len(ids) < 2:
            return
        found = pc.equal(batch.column(ids[0]), ids[0])
        if not pc.any(found).as_py():
            return
        for name in ids[1:]:
            found = pc.and_(found, pc.equal(batch.column(name), name))
        if pc.any(found).as_py():
            raise self.unreadable(path, f"row {first_row + pc.index(found, True).as_py()} repeats the line of names")

    def _quoted(self, path: FilePath) -> re.Pattern[bytes]:
        """Return the pattern of quoted fields: group 1 is the closing quote, with any stray character after it."""
        # A quote opens a quoted field only if it is the field's first character.
        delimiter = re.escape(self._head(path).delimiter.encode())
        return re.compile(rb'"(?<![^%b\r\n]")[^"]*(?:""[^"]*)*("[^%b\r\n]?)?' % (delimiter, delimiter))

    def _open_quote(self, path: FilePath) -> str | None:
        """Describe the first quoted field of the file without a proper end; None if every quoted field has an end."""
        quoted = self._quoted(path)
        with text_of(path) as stream:
            line, text = 0, b"\n" + stream.read(_BLOCK_BYTES).removeprefix(BOM)
            while text:
                block = stream.read(_BLOCK_BYTES)
                kept = len(text) - 1
                for field in quoted.finditer(text, 1):
                    why = ""
                    if field.end() == len(text) and block:
                        kept = field.start() - 1
                        if len(text) - kept > _BLOCK_BYTES:
                            why = f"is not closed within {_BLOCK_BYTES:,} bytes"
                    elif field[1] is None:
                        why = "is not closed"
                    elif len(field[1]) > 1 and (breaks := _num_lines(field[0])):
                        why = f"closes {breaks} lines below, with text after it: one of both is no quote of a field"
                    if why:
                        return f"the quote that opens in line {line + _num_lines(text[: field.start()])} {why}"
                line += _num_lines(text[:kept])
                text = text[kept:] + block if block else b""
        return None


class _Text:
    """Stream of a file's bytes for Arrow, in which no block ends in a carriage return."""

    # Arrow would drop a line feed at the beginning of the block after it.

    closed = False

    def __init__(self, stream: pa.NativeFile):
        self._stream = stream

    def read(self, size: int) -> pa.Buffer:
        block = self._stream.read_buffer(size)
        while len(block) and block[-1] == ord("\r") and (more := self._stream.read(1)):
            block = pa.py_buffer(block.to_pybytes() + more)
        return block

    def close(self) -> None:
        self._stream.close()


class _CountedText(_Text):
    def __init__(self, stream: pa.NativeFile):
        super().__init__(stream)
        self._num_ends, self._tail = 0, b""

    @property
    def last_line(self) -> bytes:
        """The unfinished last line of the text so far, or as much of it as fits in ``_TAIL_BYTES``."""
        return re.split(rb"[\r\n]", self._tail)[-1]

    @property
    def num_lines(self) -> int:
        """Number of lines so far, including an unfinished last line."""
        return self._num_ends + bool(self.last_line)

    def read(self, size: int) -> pa.Buffer:
        block = super().read(size)
        # A line ends in a line feed, in a carriage return, or in both.
        text = np.frombuffer(block, np.uint8)
        self._num_ends += max(int(np.count_nonzero(text == ord(end))) for end in "\n\r")
        self._tail = (self._tail + block[-_TAIL_BYTES:].to_pybytes())[-_TAIL_BYTES:]
        return block


def _num_lines(text: bytes) -> int:
    return text.count(b"\n") or text.count(b"\r")


def _not_utf8(path: FilePath, column: str) -> DataError:
    return DataError("is not UTF-8 text", where=f"{path}, column '{column}'", remedy="write the file in UTF-8")


def _wider(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_integer(kind) else pa.string()


_HEAD_BYTES = 1 << 16
_SAMPLE_ROWS = 100
_DELIMITERS = (",", ";", "\t", "|")
_EXCEL = re.compile(rb'"?sep=(.)"?\r?\n', re.IGNORECASE)
_QUOTED = re.compile(rb'"[^"]*"')
_VALUE = re.compile(r"\s*(?:[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\d{4}-\d\d-\d\d\b.*)\s*")
_NO_VALUE = frozenset(("", "na", "n/a", "nan", "null", "none", r"\n", "?", "-"))


class Head(NamedTuple):
    """Separator of a file's fields, and number of lines above its header (Excel writes one such as ``sep=;``)."""

    delimiter: str
    skipped_lines: int


def head_of(path: FilePath, delimiter: str | None) -> Head:
    """Return the head of a file; a ``delimiter`` of None is found from the header.

    Raises:
        DataError: the file is UTF-16, has fields separated by ``::``, or has no header.
    """
    with text_of(path) as stream:
        text = stream.read(_HEAD_BYTES)
    require_utf_8(text, path)
    text = text.removeprefix(BOM)
    excel = _EXCEL.match(text)
    if excel is not None:
        text, delimiter = text[excel.end() :], delimiter or excel[1].decode("latin-1")
    is_whole = len(text) < _HEAD_BYTES
    text = text.lstrip(b"\r\n")
    outside_quotes = _QUOTED.sub(b"", re.split(rb"[\r\n]", text, maxsplit=1)[0])
    found = next((one for one in _DELIMITERS if one.encode() in outside_quotes), None)
    if delimiter is None and found is None and b"::" in outside_quotes:
        raise DataError(
            "has fields separated by '::'",
            where=str(path),
            remedy=r"write tabs, and a header: (printf 'user\titem\trating\n'; sed 's/::/\t/g' FILE) > rows.tsv",
        )
    delimiter = delimiter or found or ","
    lines = csv.reader(io.StringIO(text.decode("utf-8", "replace"), newline=""), delimiter=delimiter)
    sample = list(itertools.islice(filter(None, lines), _SAMPLE_ROWS))
    _require_header(sample if is_whole else sample[:-1], path)
    return Head(delimiter, 0 if excel is None else 1)


def _require_header(sample: Sequence[Sequence[str]], path: FilePath) -> None:
    if len(sample) < 2:
        return
    header, *rows = sample
    widths = {len(row) for row in rows}
    if len(header) not in widths and len(widths) == 1:
        raise DataError(
            f"has {len(header)} fields in its first line and {widths.pop()} in the next ones: {_shown(header)}",
            where=str(path),
            remedy="make its first line the names of its columns, one for each field: no comment and no title above it",
        )
    if _is_row(header, [row for row in rows if len(row) == len(header)]):
        raise DataError(
            f"has values in its first line, where the names of columns belong: {_shown(header)}",
            where=str(path),
            remedy="put a line of names above it, such as user,item,rating (names that are numbers: rename them)",
        )


def _is_row(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return True if the file's first line has values, not names: numbers or dates above numbers or dates."""
    numbers = [str(number) for number in range(len(header))]
    if header == numbers or header == ["", *numbers[:-1]] or not rows:
        return False  # as pandas names columns that have no names
    has_value = False
    for name, column in zip(header, zip(*rows, strict=True), strict=True):
        there = [value for value in column if value.strip().lower() not in _NO_VALUE]
        if not there or name.strip().lower() in _NO_VALUE:
            continue
        above_values = all(_VALUE.fullmatch(value) for value in there)
        is_value = _VALUE.fullmatch(name) is not None
        above_digits = all(re.search(r"\d", value) for value in there)
        if not is_value and (above_values or (above_digits and not re.search(r"\d", name))):
            return False
        has_value |= is_value and above_values
    return has_value


def _shown(fields: Sequence[str]) -> str:
    return ", ".join(fields[:5])[:100]


class TsvReader(CsvReader):
    name = "TSV"
    suffixes = with_compressions(".tsv")
    remedy = "correct that row: a header line, tab-separated, the same number of fields in each row, UTF-8"
    delimiter = "\t"
