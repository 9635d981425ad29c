"""Limits on what a Parquet file may declare, checked before this process reads it.

A user who may put a file under the data roots must not be able to crash the service with it. A file of a few kilobytes
can claim billions of values, or a schema a thousand levels deep. The footer's size is limited before it is parsed, and
its content is checked before any page is read. A page that lies about its own size within these limits is rejected by
Arrow.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from service.core.errors import invalid
from service.datasets.file_cache import FileCache
from trainer.data.errors import DataError
from trainer.data.sources.locations import FilePath, opened
from trainer.spec.problems import FieldProblem

MAX_FOOTER_BYTES = 2**26
MAX_ROWS = 10**11
MAX_COLUMNS = 10_000
MAX_DEPTH = 16
MAX_ROW_GROUPS = 100_000
MAX_ROW_GROUP_BYTES = 2**33
"""Largest uncompressed size of a row group."""
_MAGIC = b"PAR1"
_passed: FileCache[None] = FileCache(size=10_000)


def check(path: FilePath, field: str) -> None:
    """Check a file against the limits; a damaged file passes, and its reader reports the damage.

    ``field``: the request's field that names the file.

    Raises:
        Problem: 422 at ``field`` for a file beyond the limits.
    """
    _passed.get(None, [path], lambda: _check(path, field))


def _check(path: FilePath, field: str) -> None:
    footer = _footer_bytes(path)
    if footer is None:
        return
    _refuse(path, field, "a footer", footer, MAX_FOOTER_BYTES, "bytes")
    limits = {"thrift_string_size_limit": MAX_FOOTER_BYTES, "thrift_container_size_limit": 10**7}
    try:
        with pq.ParquetFile(opened(path), **limits) as file:
            metadata = file.metadata
    except UnicodeDecodeError:
        message = f"'{path.name}' has a column whose name is not UTF-8"
        raise invalid(FieldProblem(field, message, "rename the column")) from None
    except (OSError, DataError, pa.ArrowException):
        return
    _refuse(path, field, "a table", metadata.num_rows, MAX_ROWS, "rows")
    _refuse(path, field, "a table", metadata.num_columns, MAX_COLUMNS, "columns")
    _refuse(path, field, "a table", metadata.num_row_groups, MAX_ROW_GROUPS, "row groups")
    for index in range(metadata.num_columns):
        depth = metadata.schema.column(index).path.count(".") + 1
        _refuse(path, field, "a column", depth, MAX_DEPTH, "levels")
    for number in range(metadata.num_row_groups):
        # Not of each column: pyarrow ends the process where what is said of a column of a row group contradicts itself.
        num_bytes = metadata.row_group(number).total_byte_size
        _refuse(path, field, f"row group {number}", num_bytes, MAX_ROW_GROUP_BYTES, "bytes")


def _footer_bytes(path: FilePath) -> int | None:
    """Return the footer's length in bytes, read from the file's end; None if it is not a Parquet file."""
    try:
        with open(path, "rb") if isinstance(path, Path) else opened(path) as file:
            end = path.stat().st_size
            if end < 12:
                return None
            file.seek(end - 8)
            tail = file.read(8)
    except (OSError, DataError):
        return None
    return int.from_bytes(tail[:4], "little") if tail[4:] == _MAGIC else None


def _refuse(path: FilePath, field: str, what: str, number: int, at_most: int, unit: str) -> None:
    if number > at_most:
        message = f"'{path.name}' has {what} of {number} {unit}, at most {at_most} are read"
        raise invalid(FieldProblem(field, message, "write it again in smaller parts"))
