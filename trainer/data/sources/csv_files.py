"""CSV files as streaming record batches with one type per column over all files. Torch-free.

A column is int64, float64, a date or timestamp, bool or string: the narrowest that every value of every file fits. Only
the empty field is null; strings such as NA are strings. Lists are written as ``a|b|c`` (see
trainer.data.columns.values).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.csv

from trainer.data.errors import DataError
from trainer.data.sources.locations import FilePath, opened

_BLOCK_BYTES = 1 << 24
_FAILED_COLUMN = re.compile(r"In CSV column #(\d+)")


def column_names(path: FilePath) -> list[str]:
    """Return the names in the header.

    Raises:
        DataError: the file has no header that can be read.
    """
    return _open(path, None, {}).schema.names


def infer_types(paths: Sequence[FilePath], columns: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the narrowest type of each column that fits every value of every file.

    Reads each file once, and once more for each column in which a value does not fit the type taken so far.
    """
    found: dict[str, pa.DataType] = {}
    for path in paths:
        known: dict[str, pa.DataType] = {}
        while True:
            try:
                reader = _open(path, columns, known)
                known = {field.name: field.type for field in reader.schema}
                for _ in reader:
                    pass
                break
            except pa.ArrowInvalid as error:
                failed = _failed_column(error, path)
                if failed is None or failed not in known or pa.types.is_string(known[failed]):
                    raise _unreadable(path, error) from None
                known[failed] = _wider(known[failed])
        for name, kind in known.items():
            if pa.types.is_binary(kind):
                raise DataError("is not UTF-8 text", where=f"{path}, column '{name}'", remedy="write the file in UTF-8")
            found[name] = _common(found[name], kind) if name in found else kind
    # A column without any value counts as integers.
    return {name: pa.int64() if pa.types.is_null(kind) else kind for name, kind in found.items()}


def stream(path: FilePath, types: dict[str, pa.DataType], chunk_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of up to ``chunk_rows`` rows with exactly these columns.

    Raises:
        DataError: the file cannot be read with these types.
    """
    names = list(types)
    # Without a wanted column, read one all the same: the rows still have to be counted.
    reader = _open(path, names or column_names(path)[:1], types)
    try:
        for batch in reader:
            for start in range(0, batch.num_rows, chunk_rows):
                yield batch.slice(start, chunk_rows)
    except pa.ArrowInvalid as error:
        raise _unreadable(path, error) from None


def _open(path: FilePath, columns: Sequence[str] | None, types: dict[str, pa.DataType]) -> pa.csv.CSVStreamingReader:
    try:
        return pa.csv.open_csv(
            opened(path),
            read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            parse_options=pa.csv.ParseOptions(newlines_in_values=False),
            convert_options=pa.csv.ConvertOptions(
                include_columns=list(columns) if columns is not None else None,
                column_types={name: kind for name, kind in types.items() if not pa.types.is_null(kind)},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        if _FAILED_COLUMN.search(str(error)) and columns is not None:
            raise
        raise _unreadable(path, error) from None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _failed_column(error: Exception, path: FilePath) -> str | None:
    match = _FAILED_COLUMN.search(str(error))
    return column_names(path)[int(match[1])] if match else None


def _wider(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_integer(kind) else pa.string()


def _common(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    if left == right or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    numbers = (pa.int64(), pa.float64())
    return pa.float64() if left in numbers and right in numbers else pa.string()


def _unreadable(path: FilePath, error: Exception) -> DataError:
    return DataError(
        f"cannot be read as CSV: {str(error).splitlines()[0]}",
        where=str(path),
        remedy="correct that row: a header line, comma-separated, the same number of fields in each row, UTF-8",
    )
