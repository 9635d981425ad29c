"""Files of a dataset, their columns, and their rows in streaming chunks. Torch-free.

A directory, or a prefix of object storage, is read recursively in the order of its sorted relative paths. Folders named
``key=value`` add the column ``key`` (hive partitions). Files and folders whose names start with ``.`` or ``_`` are
skipped. A folder that is a table of Delta Lake or Iceberg is read by its log (trainer.data.sources.tables).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.errors import DataError
from trainer.data.prefetch import read_ahead
from trainer.data.sources.id_types import are_written_as_integers
from trainer.data.sources.locations import FilePath, beside, listed, local_path
from trainer.data.sources.readers.base import Reader, TextReader
from trainer.data.sources.readers.registry import BROKEN_READERS, READERS, SUFFIXES, holds_rows, is_hidden, reader_of
from trainer.data.sources.row_mask import RowFilter
from trainer.data.sources.tables.base import Snapshot
from trainer.data.sources.tables.registry import snapshot_of
from trainer.data.sources.times import no_day, read_days

CHUNK_ROWS = 1 << 18
SCANNED_ROWS = 20_000_000
"""Most rows whose days are read to find days without rows; they take some seconds."""
__all__ = ["Chunk", "Source", "SourceFile", "Window", "beside", "local_path"]

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Value in the name of a ``key=value`` folder that stands for null."""


@dataclass(frozen=True)
class SourceFile:
    """One file, with the (key, value) pairs of its ``key=value`` folders as ``partitions``."""

    path: FilePath
    partitions: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = ()
    """Parts of the file's path below the dataset's uri; empty if the uri names the file itself."""


@dataclass(frozen=True)
class Window:
    """Condition on rows: ``column`` lies on a day from ``first`` to ``last``, both included, in the time zone ``zone``.

    With ``keeps_undated``, rows without a valid day are read too; the reader counts them as bad rows.
    """

    column: str
    first: datetime.date
    last: datetime.date
    zone: str = "UTC"
    keeps_undated: bool = False

    def __str__(self) -> str:
        return f"{self.column} in [{self.first}, {self.last}]" + (f" of {self.zone}" if self.zone != "UTC" else "")

    def has(self, days: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the days, given as numbers since 1970-01-01, that lie in the window."""
        return np.asarray((days >= _day(self.first)) & (days <= _day(self.last)))


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file.

    ``rows`` are the rows' numbers in the file (from 0), and ``end`` is the number of the next row to read. ``num_bad``
    counts the bad rows that were left out.
    """

    file: SourceFile
    rows: npt.NDArray[np.int64]
    batch: pa.RecordBatch
    end: int = 0
    num_bad: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> pa.Array:
        return self.batch.column(name)

    def where(self, column: str, position: int | None = None) -> str:
        """Return 'file, column c, row r' for error messages; ``position`` counts the chunk's rows from 0."""
        row = "" if position is None else f", row {self.rows[position]}"
        return f"{self.file.path}, column '{column}'{row}"


class Source:
    """The files of one dataset. Columns are checked before any row is read.

    Args:
        uri: location of the files.
        window: days of the rows to read; None: all.
        only: the only files to read; None: all.
        row_filter: condition that rows must meet to be read; None: all are read.
        text: names of columns to read as text, even if all values are digits and the files declare no types.
        ids: names of columns with ids, which are kept as they are written (trainer.data.sources.id_types).
    """

    def __init__(
        self,
        uri: str,
        window: Window | None = None,
        row_filter: str | None = None,
        only: Sequence[SourceFile] | None = None,
        text: Collection[str] = (),
        ids: Collection[str] = (),
    ):
        self.uri = uri
        self.window = window
        self.filter = None if row_filter is None else RowFilter(row_filter)
        found = _find_files(uri) if only is None else _Found(False, tuple(only), _reader_of(uri, only))
        self.is_file, self.files, self._version = found.is_file, found.files, found.version
        self.passed_over = found.others
        declared = {**found.partition_types, **dict.fromkeys(text, pa.string())}
        self._hive, values = _hive_types(self.files, declared, ids)
        if window is not None and window.column in self._hive:
            self.files = self._files_in_window(window)
        self.reader = found.reader([file.path for file in self.files])
        if isinstance(self.reader, TextReader):
            # Days are read as text, in which a plain date differs from a time at midnight.
            has_zone = window is not None and window.zone != "UTC"
            self.reader.text = [*text, window.column] if window is not None and has_zone else text
        self.reader.ids = ids
        like_numbers = ((name, texts) for name, texts in values.items() if name in ids and name not in declared)
        for name, texts in like_numbers:
            if pa.types.is_string(self._hive[name]) and _are_numbers(texts):
                self.reader.number_like[name] = next(text for text in texts if not _is_id_number(text))

    @property
    def has_all_rows(self) -> bool:
        """True if neither a window nor a filter leaves out rows of the files."""
        return self.window is None and self.filter is None

    def column_names(self) -> list[str]:
        """Return the names of the first file's columns, then the keys of the ``key=value`` folders."""
        names = list(self.reader.schema(self.files[0].path).names)
        return names + [name for name in self._hive if name not in names]

    def require(self, columns: Sequence[str]) -> None:
        """Check that every file has each column exactly once and in compatible types, and find the common types.

        Raises:
            DataError: a column is missing, occurs twice, or has incompatible types.
        """
        self._require_once(columns)
        stored = [name for name in dict.fromkeys(columns) if name not in self._hive]
        self.reader.infer_types(stored)

    def problems(self, columns: Sequence[str]) -> dict[str, DataError]:
        """Return an error for each of these columns that some file lacks, has twice, or has in an incompatible type.

        No rows are read, so the types in text files, such as CSV, are not checked.
        """
        found = {}
        for column in columns:
            try:
                if not column:
                    raise DataError("a column has no name", where=self.uri, remedy="name it, to have it read")
                self._require_once([column])
                if column not in self._hive and not isinstance(self.reader, TextReader):
                    self.reader.declared_type(column, strict=True)
            except DataError as error:
                found[column] = error
        return found

    def _require_once(self, columns: Sequence[str]) -> None:
        before: pa.Schema | None = None
        for file in self.files:
            schema = self.reader.schema(file.path)
            if schema is before:
                continue
            before, names = schema, schema.names
            for column in columns:
                if column not in self._hive and names.count(column) != 1:
                    raise self._lacks(file, column) if column not in names else _twice(file, column)

    def _lacks(self, file: SourceFile, column: str) -> DataError:
        names = set(self.reader.schema(file.path).names) | set(self._hive)
        others = [one for one in self.files if column in self.reader.schema(one.path).names]
        beside = f", which {others[0].path} has" if others else ""
        remedy = "name an existing column in the dataset spec, or add it to the file"
        if (blank := next((name for name in names if name.strip() == column.strip()), None)) is not None:
            remedy = f"name the column '{blank}' in the dataset spec, with its blanks, or write the header without them"
        return DataError(
            f"no column '{column}'{beside} (there are {', '.join(sorted(names))})", where=str(file.path), remedy=remedy
        )

    def column_type(self, column: str) -> pa.DataType:
        """Return the common type over all files of a column for which :meth:`require` was called."""
        return self._hive[column] if column in self._hive else self.reader.column_type(column)

    def stream(
        self,
        columns: Sequence[str],
        chunk_rows: int = CHUNK_ROWS,
        *,
        start: tuple[int, int] = (0, 0),
        stop: tuple[int, int] | None = None,
    ) -> Generator[Chunk]:
        """Yield rows inside the window, in file order, in chunks of up to ``chunk_rows``.

        Args:
            columns: the columns of the chunks.
            chunk_rows: most rows of a chunk; a chunk has rows of one file only.
            start: numbers of the first file and of its first row to read. A stream that starts at :attr:`Chunk.end`
                of a chunk continues with the same chunks as a stream from the beginning.
            stop: number of the last file, and of the first row in it that is not read; None: all rows are read.

        Raises:
            DataError: a file cannot be read.
        """
        self.require(columns)
        if self.window is not None and self.window.column not in self._hive:
            self.require([self.window.column])
        if self.filter is not None:
            self.require(self.filter.columns)
        last, stop_row = (len(self.files) - 1, None) if stop is None else stop
        for number in range(start[0], last + 1):
            first_row = start[1] if number == start[0] else 0
            until = stop_row if number == last else None
            yield from self.stream_file(self.files[number], columns, chunk_rows, first_row, until)

    def stream_file(
        self,
        file: SourceFile,
        columns: Sequence[str],
        chunk_rows: int = CHUNK_ROWS,
        first_row: int = 0,
        stop_row: int | None = None,
    ) -> Iterator[Chunk]:
        """Yield the rows of one file from ``first_row`` on and before ``stop_row``, in chunks as :meth:`stream` does.

        :meth:`require` must have been called for the columns.
        """
        names = list(dict.fromkeys(columns))
        window_column = self.window.column if self.window is not None and self.window.column not in self._hive else None
        filtered = self.filter.columns if self.filter is not None else ()
        read = [*names, *filtered, *([window_column] if window_column else [])]
        stored = [name for name in read if name not in self._hive]
        if not stored:
            # The rows still have to be counted.
            stored = self.reader.schema(file.path).names[:1]
            self.reader.infer_types(stored)
        decoded = self.reader.batches(file.path, list(dict.fromkeys(stored)), chunk_rows, first_row, stop_row)
        # The next rows are decoded while these are worked on.
        with contextlib.closing(read_ahead(decoded)) as batches:
            for batch in batches:
                rows = np.arange(first_row, first_row + batch.num_rows)
                first_row += batch.num_rows
                if window_column is not None and self.window is not None:
                    dated = batch.column(window_column)
                    days, is_day = read_days(dated, self.window.zone)
                    if not (is_day.all() or self.window.keeps_undated):
                        undated = int(np.argmin(is_day))
                        raise no_day(dated, undated, f"{file.path}, column '{window_column}', row {rows[undated]}")
                    inside = np.flatnonzero(self.window.has(days) | ~is_day)
                    rows, batch = rows[inside], batch.take(pa.array(inside))
                if self.filter is not None:
                    read_by_filter = self._with_hive(file, batch, list(filtered))
                    passing = self.filter.passing(read_by_filter, str(file.path))
                    rows, batch = rows[passing], batch.take(pa.array(passing))
                if len(rows):
                    yield Chunk(file, rows, self._with_hive(file, batch, names), first_row)

    def days_without_rows(self) -> str | None:
        """Return a sentence on the days of the window that have no row.

        None: all have rows, there is no window, or to tell takes long: the days are in text files, which would have to
        be parsed, or in more than SCANNED_ROWS rows.
        """
        window = self.window
        if window is None:
            return None
        if window.column not in self._hive:
            num_rows = self.reader.num_rows() if self.reader.has_types else None
            if num_rows is None or num_rows > SCANNED_ROWS:
                return None
        first = _day(window.first)
        has_rows = np.zeros(_day(window.last) - first + 1, dtype=bool)
        for days in self._days_of_rows(window):
            has_rows[days[window.has(days)] - first] = True
            if has_rows.all():
                return None
        missing = [str(window.first + datetime.timedelta(days=int(day))) for day in np.flatnonzero(~has_rows)]
        shown = ", ".join(missing) if len(missing) <= 3 else f"{missing[0]}, ..., {missing[-1]}"
        return f"{len(missing)} of {len(has_rows)} days of the window ({window}) have no rows: {shown}"

    def _days_of_rows(self, window: Window) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the days of rows of the files, as numbers since 1970-01-01; rows without a valid day have none."""
        if window.column in self._hive:
            texts = [dict(file.partitions)[window.column] for file in self.files]
            days, is_day = read_days(pa.array([None if text == HIVE_NULL else text for text in texts]), window.zone)
            yield days[is_day]
            return
        self.require([window.column])
        for file in self.files:
            for batch in self.reader.batches(file.path, [window.column], CHUNK_ROWS):
                days, is_day = read_days(batch.column(window.column), window.zone)
                yield days[is_day]

    def schema(self) -> pa.Schema:
        """Return the names and types of the first file's columns and of its ``key=value`` folders."""
        first = self.reader.read_schema(self.files[0].path)
        folders = [pa.field(name, type_) for name, type_ in self._hive.items() if name not in first.names]
        return pa.schema([*first, *folders])

    def fingerprint_files(self) -> list[list[object]]:
        """Return [path, size, modification time in ns] of each file; for a table, also [its version] at the end."""
        stats = [(file.path, file.path.stat()) for file in self.files]
        version: list[list[object]] = [[self._version]] if self._version else []
        return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats] + version

    def _with_hive(self, file: SourceFile, batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
        values = dict(file.partitions)
        arrays = []
        for name in names:
            if name in self._hive:
                value = pa.scalar(None if values[name] == HIVE_NULL else values[name], pa.string())
                arrays.append(pa.repeat(value.cast(self._hive[name]), batch.num_rows))
            else:
                arrays.append(batch.column(name))
        return pa.RecordBatch.from_arrays(arrays, names=names) if names else batch

    def _files_in_window(self, window: Window) -> tuple[SourceFile, ...]:
        inside, days = [], []
        for file in self.files:
            text = dict(file.partitions)[window.column]
            value = pa.array([None if text == HIVE_NULL else text], pa.string())
            day, is_day = read_days(value, window.zone)
            if not (is_day[0] or window.keeps_undated):
                raise no_day(value, 0, f"{file.path.parent}, folder {window.column}={text}")
            days += day[is_day].tolist()
            if not is_day[0] or window.has(day)[0]:
                inside.append(file)
        if not inside:
            raise no_rows_in_window(self.uri, window, min(days), max(days))
        return tuple(inside)


def _twice(file: SourceFile, column: str) -> DataError:
    return DataError(
        "the file has two columns of this name",
        where=f"{file.path}, column '{column}'",
        remedy="rename one of them, or write the file without it",
    )


def no_rows_of_days(source: Source) -> DataError:
    """Return the error of a source whose window has no row, with the days that its files have."""
    assert source.window is not None
    bounds = [(days.min(), days.max()) for days in source._days_of_rows(source.window) if len(days)]
    found = (int(min(low for low, _ in bounds)), int(max(high for _, high in bounds))) if bounds else (None, None)
    return no_rows_in_window(source.uri, source.window, *found)


def no_rows_in_window(uri: str, window: Window, first_day: int | None = None, last_day: int | None = None) -> DataError:
    span = ""
    if first_day is not None and last_day is not None:
        epoch = datetime.date(1970, 1, 1)
        span = f"; it holds {epoch + datetime.timedelta(first_day)} to {epoch + datetime.timedelta(last_day)}"
    return DataError(
        f"no rows with {window}{span}",
        where=uri,
        remedy="choose dataset.window inside the data, or add the missing days",
    )


def _day(date: datetime.date) -> int:
    return (date - datetime.date(1970, 1, 1)).days


@dataclass(frozen=True)
class _Found:
    """Files of rows found at a uri, sorted by their paths, and their reader; ``is_file``: the uri is a single file."""

    is_file: bool
    files: tuple[SourceFile, ...]
    reader: Callable[[Sequence[FilePath]], Reader]
    version: str = ""
    """Version of the table of Delta Lake or Iceberg; empty if the uri is no such table."""
    partition_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Types of the partition columns of a table of Delta Lake or Iceberg."""
    others: tuple[str, ...] = ()
    """Names of files in the folder that are not read, because no format has their endings."""


def _find_files(uri: str) -> _Found:
    single, listing = listed(uri)
    if single:
        ((_, path),) = listing
        if reader_of(path.name) is None:
            remedy = "convert it, or rename it"
            if ".json" in path.name.lower():
                remedy = "rename it to .jsonl; an array of objects: jq -c '.[]' FILE > rows.jsonl"
            remedy = "; ".join([remedy, *BROKEN_READERS.values()])
            raise DataError(f"has none of the endings {', '.join(SUFFIXES)}", where=str(path), remedy=remedy)
        only = (_checked(SourceFile(path)),)
        return _Found(True, only, _reader_of(uri, only))
    table = snapshot_of(uri, dict(listing))
    if table is not None:
        return _Found(False, _files_of(table, dict(listing)), table.reader, table.version, table.partition_types)
    rows = sorted(((parts, path) for parts, path in listing if holds_rows(parts)), key=lambda one: one[0])
    files = [_checked(file_below(parts, path)) for parts, path in rows]
    if not files:
        remedy = "; ".join(["put the data there, or correct uri", *BROKEN_READERS.values()])
        raise DataError(f"holds no file that ends in {', '.join(SUFFIXES)}", where=uri, remedy=remedy)
    others = (parts[-1] for parts, _ in listing if reader_of(parts[-1]) is None and not is_hidden(parts))
    return _Found(False, tuple(files), _reader_of(uri, files), others=tuple(sorted(others)))


def file_below(parts: tuple[str, ...], path: FilePath) -> SourceFile:
    """Return a file with the values of its ``key=value`` folders; ``parts``: its path below the dataset's uri."""
    # Writers of hive partitions escape characters that a folder name may not contain.
    pairs = ((key, unquote(value)) for key, sign, value in (part.partition("=") for part in parts[:-1]) if sign)
    return SourceFile(path, tuple((key, value or HIVE_NULL) for key, value in pairs), parts)


def _files_of(table: Snapshot, paths: Mapping[tuple[str, ...], FilePath]) -> tuple[SourceFile, ...]:
    files = []
    for file in sorted(table.files, key=lambda one: one.parts):
        values = tuple((key, value or HIVE_NULL) for key, value in file.partitions)
        files.append(_checked(SourceFile(paths[file.parts], values, file.parts)))
    return tuple(files)


def _checked(file: SourceFile) -> SourceFile:
    if file.path.stat().st_size == 0:
        raise DataError("is empty (0 bytes)", where=str(file.path), remedy="write it again, or remove it")
    return file


def _reader_of(uri: str, files: Sequence[SourceFile]) -> type[Reader]:
    readers = {reader for file in files if (reader := reader_of(file.path.name)) is not None}
    if len(readers) > 1:
        names = " and ".join(reader.name for reader in READERS if reader in readers)
        raise DataError(f"mixes {names} files", where=uri, remedy="keep one format per directory")
    return readers.pop()


def _hive_types(
    files: tuple[SourceFile, ...], declared: Mapping[str, pa.DataType], ids: Collection[str]
) -> tuple[dict[str, pa.DataType], dict[str, list[str]]]:
    """Return two dictionaries for the keys of the ``key=value`` folders: the type, and each file's value as text."""
    keys = [key for key, _ in files[0].partitions]
    for file in files:
        if [key for key, _ in file.partitions] != keys:
            raise DataError(
                "lies at another depth of key=value folders than the first file",
                where=str(file.path),
                remedy="give every file the same partition folders",
            )
    values = {key: [dict(file.partitions)[key] for file in files] for key in keys}
    return {key: _hive_type(texts, declared.get(key), key in ids) for key, texts in values.items()}, values


def _hive_type(texts: Sequence[str], declared: pa.DataType | None, is_id: bool) -> pa.DataType:
    if declared is not None and pa.types.is_integer(declared):
        return pa.int64()
    is_text = declared is not None and (pa.types.is_string(declared) or pa.types.is_large_string(declared))
    are_numbers = all(map(_is_id_number, texts)) if is_id else _are_numbers(texts)
    return pa.int64() if are_numbers and not is_text else pa.string()


def _is_id_number(text: str) -> bool:
    return text == HIVE_NULL or are_written_as_integers(pa.array([text]))


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(text == HIVE_NULL or _is_number(text) for text in texts)


def _is_number(text: str) -> bool:
    """Return True if the value of a ``key=value`` folder consists of digits and fits int64."""
    return text.isascii() and text.isdigit() and len(text.lstrip("0")) <= 19 and int(text) < 2**63
