"""What a format of files of rows is: the class that readers derive from. Torch-free."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pyarrow as pa

from trainer.data.errors import DataError
from trainer.data.sources.locations import FilePath, opened


class Reader(ABC):
    """The files of one dataset, all in one format.

    Args:
        paths: the files, in the order of their rows.
    """

    name: ClassVar[str]
    """The format, as messages write it."""
    suffixes: ClassVar[tuple[str, ...]]
    """Endings of the names of its files."""
    has_types: ClassVar[bool] = True
    """Whether a file says the types of its columns ahead of its rows."""
    remedy: ClassVar[str]
    """What to do about a file that cannot be read."""

    def __init__(self, paths: Sequence[FilePath]):
        self.paths = tuple(paths)
        self._schemas: dict[FilePath, pa.Schema] = {}

    @abstractmethod
    def read_schema(self, path: FilePath) -> pa.Schema:
        """Return names and types of the columns of one file."""

    @abstractmethod
    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file in their order, in batches of up to ``chunk_rows`` with exactly these columns."""

    def read_batches_from(
        self, path: FilePath, columns: list[str], chunk_rows: int, first_row: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield :meth:`read_batches` without the rows before ``first_row``; a format may pass over them unread."""
        for batch in self.read_batches(path, columns, chunk_rows):
            if first_row < batch.num_rows:
                yield batch.slice(first_row)
            first_row = max(0, first_row - batch.num_rows)

    def num_rows(self) -> int | None:
        """Return the rows of all files where that is known without reading them."""
        return None

    def integer_span(self, column: str) -> int | None:
        """Return max - min + 1 of a column of integers where that is known without reading it."""
        return None

    def infer_types(self, columns: Sequence[str]) -> None:  # noqa: B027 - nothing to do where files say them
        """Find the types of columns where files do not say them: in text."""

    def column_type(self, column: str) -> pa.DataType:
        """Return the type of a column for which :meth:`infer_types` was called; from the first file."""
        return self.schema(self.paths[0]).field(column).type

    def schema(self, path: FilePath) -> pa.Schema:
        """Return :meth:`read_schema`, read once.

        Raises:
            DataError: the file cannot be read.
        """
        if path not in self._schemas:
            with self.reading(path):
                self._schemas[path] = self.read_schema(path)
        return self._schemas[path]

    def batches(
        self, path: FilePath, columns: list[str], chunk_rows: int, first_row: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file from ``first_row`` on, as :meth:`read_batches` does.

        Raises:
            DataError: the file cannot be read.
        """
        with self.reading(path):
            if first_row:
                yield from self.read_batches_from(path, columns, chunk_rows, first_row)
            else:
                yield from self.read_batches(path, columns, chunk_rows)

    @contextlib.contextmanager
    def reading(self, path: FilePath) -> Iterator[None]:
        """Turn what Arrow and the operating system raise about a file into DataError with the format's remedy."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise self.unreadable(path, str(error).splitlines()[0]) from None

    def unreadable(self, path: FilePath, why: str) -> DataError:
        return DataError(f"cannot be read as {self.name}: {why}", where=str(path), remedy=self.remedy)


class TextReader(Reader):
    """A format whose values have no declared types: a column gets the narrowest that fits every value of every file."""

    has_types = False

    def __init__(self, paths: Sequence[FilePath]):
        super().__init__(paths)
        self._types: dict[str, pa.DataType] = {}

    @abstractmethod
    def types_in(self, path: FilePath, columns: list[str]) -> dict[str, pa.DataType]:
        """Return the narrowest types that fit the values of one file; null for a column without any value."""

    def infer_types(self, columns: Sequence[str]) -> None:
        missing = [name for name in columns if name not in self._types]
        if not missing:
            return
        types: dict[str, pa.DataType] = {}
        for path in self.paths:
            with self.reading(path):
                self.merge(types, self.types_in(path, missing))
        self._types.update({name: _with_values(kind) for name, kind in types.items()})

    def column_type(self, column: str) -> pa.DataType:
        return self._types[column]

    def merge(self, types: dict[str, pa.DataType], more: dict[str, pa.DataType]) -> None:
        """Widen ``types`` so that they also fit the values that have the types ``more``."""
        for name, right in more.items():
            left = types.get(name, pa.null())
            common = self.common_type(left, right)
            if common is None:
                raise pa.ArrowInvalid(f"column '{name}' is {left} in one row and {right} in another")
            types[name] = common

    def common_type(self, left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
        """Return the narrowest type for the values of both, None if there is none; every value can be text here."""
        if left == right or pa.types.is_null(right):
            return left
        if pa.types.is_null(left):
            return right
        numbers = (pa.int64(), pa.float64())
        return pa.float64() if left in numbers and right in numbers else pa.string()


def text_of(path: FilePath) -> pa.NativeFile:
    """Return a stream of the bytes of a file, decompressed where its name ends in .gz."""
    return pa.input_stream(opened(path), compression="gzip" if path.name.endswith(".gz") else None)


def _with_values(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column as it is read: without any value it counts as integers."""
    if pa.types.is_list(kind):
        return pa.list_(_with_values(kind.value_type))
    return pa.int64() if pa.types.is_null(kind) else kind
