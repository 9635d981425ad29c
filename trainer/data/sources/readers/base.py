"""Base class of the readers of file formats. Torch-free."""

from __future__ import annotations

import contextlib
import contextvars
import errno
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import pyarrow as pa

from trainer.data.errors import DataAwayError, DataError, DataMemoryError
from trainer.data.sources.id_types import are_mixed, common_id_type, common_written_type
from trainer.data.sources.locations import FilePath, opened
from trainer.data.sources.types import (
    FieldPath,
    common_type,
    element_type,
    field_of,
    fields_of,
    is_read_by_row,
    is_text,
    plain_batch,
    plain_type,
)


class Reader(ABC):
    """Reader of the files of one dataset, all in one format.

    ``paths``: the files, in the order of their rows.
    """

    name: ClassVar[str]
    """Name of the format, as error messages write it."""
    suffixes: ClassVar[tuple[str, ...]]
    """Endings of the names of the format's files, in lower case."""
    has_types: ClassVar[bool] = True
    """True if a file declares the types of its columns."""
    remedy: ClassVar[str]
    """Advice in the error for a file that cannot be read."""
    reads_fields: ClassVar[bool] = False
    """True if :meth:`read_batches` accepts a column ``a.b``, and yields the struct ``a`` with only its field ``b``."""

    def __init__(self, paths: Sequence[FilePath]):
        self.paths = tuple(paths)
        self._schemas: dict[FilePath, pa.Schema] = {}
        self._field_paths: dict[FilePath, dict[str, FieldPath]] = {}
        self._lacking: dict[FilePath, dict[str, pa.DataType]] = {}
        self._types: dict[str, pa.DataType] = {}
        self.declared: dict[str, pa.DataType] = {}
        """Types of the columns that files may lack, keyed by column; their values are then null."""
        self.ids: Collection[str] = ()
        """Names of columns with ids. If one file has text and another has integers in such a column, its ids are text.
        """
        self.mixed: set[str] = set()
        """Names of id columns with text in one file and integers in another."""
        self.number_like: dict[str, str] = {}
        """Id columns read as text, though all values, or those of the first file, could be read as numbers.

        Keys are column names. Each value is an example of an id that is not written as an integer is, or "" if
        there is no example.
        """

    @abstractmethod
    def read_schema(self, path: FilePath) -> pa.Schema:
        """Return the names and types of the columns of one file."""

    @abstractmethod
    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file in their order, in batches of up to ``chunk_rows`` with exactly these columns."""

    def read_batches_from(
        self, path: FilePath, columns: list[str], chunk_rows: int, first_row: int, stop_row: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of :meth:`read_batches` from number ``first_row`` on and before number ``stop_row``.

        The reader of a format may skip the other rows unread.
        """
        begin = 0
        for batch in self.read_batches(path, columns, chunk_rows):
            end = begin + batch.num_rows if stop_row is None else min(begin + batch.num_rows, stop_row)
            if max(first_row, begin) < end:
                yield batch.slice(max(0, first_row - begin), end - max(first_row, begin))
            begin += batch.num_rows
            if stop_row is not None and begin >= stop_row:
                return

    def passes_over_rows(self, path: FilePath) -> bool:
        """Return True if reading can begin at any row of a file, without reading the rows before it."""
        return False

    def rows_in(self, path: FilePath) -> int | None:
        """Return the number of rows of one file; None if rows must be read to know it."""
        return None

    def num_rows(self) -> int | None:
        """Return the total number of rows of all files; None if rows must be read to know it."""
        counts = [self.rows_in(path) for path in self.paths]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def integer_span(self, column: str) -> int | None:
        """Return max - min + 1 of a column of integers; None if rows must be read to know it."""
        return None

    def infer_types(self, columns: Sequence[str]) -> None:
        """Find the common type of each column over all files; every file must have each column.

        Raises:
            DataError: a column's type in one file is incompatible with its type in the files before.
        """
        for name in columns:
            if name not in self._types:
                self._types[name] = plain_type(self.declared_type(name))

    def column_type(self, column: str) -> pa.DataType:
        """Return the common type over all files of a column for which :meth:`infer_types` was called."""
        return self._types[column]

    def declared_type(self, column: str, *, strict: bool = False) -> pa.DataType:
        """Return the type that can hold a column's values of all files, from the types that the files declare.

        Without ``strict``, text is compatible with numbers and times, and single values with lists. The first file's
        type is then returned, and each row of later files with unreadable values is reported.

        Raises:
            DataError: there is no such type.
        """
        first = self.schema(self.paths[0])
        type_: pa.DataType = first.field(column).type
        for path in self.paths[1:]:
            schema = self.schema(path)
            if schema is first:
                continue
            there = schema.field(column).type
            common = common_type(type_, there)
            if common is None and not strict and column in self.ids:
                common = self._common_id_type(column, type_, there)
            if common is None and (strict or not is_read_by_row(type_, there)):
                raise DataError(
                    f"is {there} here and {type_} in {self.paths[0]}",
                    where=f"{path}, column '{column}'",
                    remedy="write the column with one type in every file, or leave it out of the dataset",
                )
            type_ = type_ if common is None else common
        return type_

    def _common_id_type(self, column: str, left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
        common = common_id_type(plain_type(left), plain_type(right))
        if common is not None:
            self.mixed.add(column)
            if not is_text(element_type(plain_type(left))):
                self.number_like.setdefault(column, "")
        return common

    @property
    def notes(self) -> list[str]:
        """Messages for the user about columns of ids that are read as text."""
        found = [f"column '{name}': has text and integers, which are read as text" for name in sorted(self.mixed)]
        return found + [
            f"column '{name}': its ids are text, since they are not all written as integers are, such as '{example}'"
            for name, example in sorted(self.number_like.items())
            if example
        ]

    def schema(self, path: FilePath) -> pa.Schema:
        """Return the names and types of the columns of one file, with fields of structs as columns ``a.b``.

        Each file is read once; later calls return the same schema.

        Raises:
            DataError: the file cannot be read.
        """
        if path not in self._schemas:
            with self.reading(path):
                fields = list(fields_of(self.read_schema(path)))
            stored = [(".".join(names), type_) for names, type_ in fields]
            there = {name for name, _ in stored}
            lacking = {name: type_ for name, type_ in self.declared.items() if name not in there}
            schema = pa.schema([*stored, *lacking.items()])
            # Most of a dataset's thousands of files have the schema of the first file.
            first = self._schemas.get(self.paths[0])
            schema = first if first is not None and first.equals(schema) else schema
            self._schemas[path] = schema
            self._field_paths[path] = {".".join(names): names for names, _ in fields if len(names) > 1}
            self._lacking[path] = lacking
        return self._schemas[path]

    def batches(
        self, path: FilePath, columns: list[str], chunk_rows: int, first_row: int = 0, stop_row: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file from ``first_row`` on and before ``stop_row``, as :meth:`read_batches` does.

        Columns that the file stores as dictionaries, runs or views of text are turned into plain columns.

        Raises:
            DataError: the file cannot be read.
        """
        schema, nested, lacking = self.schema(path), self._field_paths[path], self._lacking[path]
        # With no column to read, the first one is read to count the rows.
        stored = [name for name in columns if name not in lacking] or schema.names[:1]
        read = list(dict.fromkeys(name if self.reads_fields else nested.get(name, (name,))[0] for name in stored))
        with self.reading(path):
            if first_row or stop_row is not None:
                batches = self.read_batches_from(path, read, chunk_rows, first_row, stop_row)
            else:
                batches = self.read_batches(path, read, chunk_rows)
            if not (nested.keys() | lacking.keys()) & set(columns):
                yield from map(plain_batch, batches)
                return
            for batch in batches:
                arrays = [
                    pa.nulls(batch.num_rows, lacking[name])
                    if name in lacking
                    else field_of(batch, nested.get(name, (name,)))
                    for name in columns
                ]
                yield plain_batch(pa.RecordBatch.from_arrays(arrays, names=columns))

    @contextlib.contextmanager
    def reading(self, path: FilePath) -> Iterator[None]:
        """Turn errors of Arrow and the operating system about a file into DataError with the format's remedy."""
        try:
            yield
        except UnicodeDecodeError:
            raise self.unreadable(path, "the name of a column is not UTF-8") from None
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, pa.ArrowMemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
                raise DataMemoryError(
                    f"there is not enough memory to read it as {self.name}: {str(error).splitlines()[0]}",
                    where=str(path),
                    remedy="give the process more memory, or write the file in smaller row groups, stripes or batches; "
                    "if the requested size is absurdly large, the file is damaged",
                ) from None
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                remedy = "raise `ulimit -n` of the process, then try again"
                raise DataAwayError("cannot be opened: too many open files", where=str(path), remedy=remedy) from None
            raise self.unreadable(path, str(error).splitlines()[0]) from None

    def unreadable(self, path: FilePath, why: str) -> DataError:
        return DataError(f"cannot be read as {self.name}: {why}", where=str(path), remedy=self.remedy)


class TextReader(Reader):
    """Reader of a format without declared types: a column's type is the narrowest that fits all values of all files."""

    has_types = False
    text: Collection[str] = ()
    """Names of columns to read as text, even if every value could be read as another type."""

    @abstractmethod
    def types_in(self, path: FilePath, columns: list[str]) -> dict[str, pa.DataType]:
        """Return the narrowest types that fit the values of one file; null for a column without any value."""

    def infer_types(self, columns: Sequence[str]) -> None:
        self.schema(self.paths[0])
        nested = self._field_paths[self.paths[0]]
        roots = dict.fromkeys(nested.get(name, (name,))[0] for name in columns)
        missing = [name for name in roots if name not in self._types]
        if not missing:
            return
        types: dict[str, pa.DataType] = {}
        for path in self.paths:
            with self.reading(path):
                self.merge(types, self.types_in(path, missing))
        types = {name: self.as_text(kind) if name in self.text else kind for name, kind in types.items()}
        self._types.update({name: _with_values(kind) for name, kind in types.items()})

    def column_type(self, column: str) -> pa.DataType:
        root, *rest = self._field_paths[self.paths[0]].get(column, (column,))
        type_ = self._types[root]
        for name in rest:
            type_ = type_.field(name).type
        return type_

    def merge(self, types: dict[str, pa.DataType], more: dict[str, pa.DataType]) -> None:
        """Widen ``types``, in place, so that each column also fits values of its type in ``more``."""
        for name, right in more.items():
            left = types.get(name, pa.null())
            common = self.common_type(left, right, name)
            if common is None:
                raise pa.ArrowInvalid(f"column '{name}' is {left} in one row and {right} in another")
            types[name] = common

    def as_text(self, kind: pa.DataType) -> pa.DataType:
        """Return the text type that keeps values of this type as they are written."""
        return pa.string()

    def common_type(self, left: pa.DataType, right: pa.DataType, name: str) -> pa.DataType | None:
        """Return the narrowest type that fits a column's values of types ``left`` and ``right``, None if there is none.

        In this base class there is always a common type, because every value can be read as text.
        """
        if name in self.ids and are_mixed(left, right):
            self.mixed.add(name)
        return common_written_type(left, right)


_most_bytes: contextvars.ContextVar[int | None] = contextvars.ContextVar("_most_bytes", default=None)
BOM = b"\xef\xbb\xbf"
"""Byte order mark that some programs write at the beginning of UTF-8 text."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Compression of text files, by the last ending of their names."""


def with_compressions(*suffixes: str) -> tuple[str, ...]:
    """Return the endings of names of text files: each suffix as it is, and followed by each compression's ending."""
    return tuple(suffix + more for more in ("", *COMPRESSIONS) for suffix in suffixes)


def text_of(path: FilePath) -> pa.NativeFile:
    """Return a stream of the bytes of a file, decompressed if its name has an ending in ``COMPRESSIONS``."""
    compression = next((kind for suffix, kind in COMPRESSIONS.items() if path.name.lower().endswith(suffix)), None)
    stream = pa.input_stream(opened(path), compression=compression)
    most = _most_bytes.get()
    if most is None:
        return stream
    with stream:
        text = stream.read(most)
        return pa.BufferReader(text if not stream.read(1) else _whole_lines(text))


@contextlib.contextmanager
def beginnings(num_bytes: int) -> Iterator[None]:
    """Within the block, text files end after the last whole line of their first ``num_bytes`` (decompressed)."""
    token = _most_bytes.set(num_bytes)
    try:
        yield
    finally:
        _most_bytes.reset(token)


def _whole_lines(text: bytes) -> bytes:
    """Return the text up to its last line end, preferably outside quotes; all of the text if it has no line end."""
    end = last = text.rfind(b"\n") + 1
    quotes = text.count(b'"', 0, end)
    while quotes % 2 and end:
        start = text.rfind(b"\n", 0, end - 1) + 1
        quotes -= text.count(b'"', start, end)
        end = start
    return text[: end or last or len(text)]


def require_utf_8(text: bytes, path: FilePath) -> None:
    """Check that the first bytes of a file are not UTF-16 text, which Excel and Windows write.

    Raises:
        DataError: the bytes are UTF-16, or not text.
    """
    if text.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in text[:4]:
        remedy = "write the file in UTF-8: iconv -f UTF-16 -t UTF-8 FILE"
        raise DataError("is UTF-16 text, or no text", where=str(path), remedy=remedy)


def _with_values(kind: pa.DataType) -> pa.DataType:
    """Return a type with int64 instead of null, the type of columns or elements without any value."""
    if pa.types.is_list(kind):
        return pa.list_(_with_values(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _with_values(field.type)) for field in kind])
    return pa.int64() if pa.types.is_null(kind) else kind
