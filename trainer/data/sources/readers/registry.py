"""Readers of all formats; other packages register theirs as ``evenkeel.readers``."""

from __future__ import annotations

from collections.abc import Sequence

from embeddings.outside_packages import load_all
from trainer.data.sources.readers.base import Reader
from trainer.data.sources.readers.csv import CsvReader, TsvReader
from trainer.data.sources.readers.feather import FeatherReader
from trainer.data.sources.readers.json_lines import JsonLinesReader
from trainer.data.sources.readers.parquet import ParquetReader
from trainer.data.sources.readers.scanned import OrcReader

_OUTSIDE, BROKEN_READERS = load_all("evenkeel.readers")
"""Readers of other packages, and the errors of those that cannot be imported, both keyed by name."""

READERS: tuple[type[Reader], ...] = (
    ParquetReader,
    CsvReader,
    TsvReader,
    JsonLinesReader,
    FeatherReader,
    OrcReader,
    *_OUTSIDE.values(),
)

SUFFIXES: tuple[str, ...] = tuple(suffix for reader in READERS for suffix in reader.suffixes)
"""Endings of the names of files that hold rows."""


def reader_of(name: str) -> type[Reader] | None:
    """Return the reader of a file by the end of its name, in upper or lower case."""
    return next((reader for reader in READERS if name.lower().endswith(reader.suffixes)), None)


def holds_rows(parts: Sequence[str]) -> bool:
    """Return True if the file at these parts of a path below a dataset's directory is one of its files."""
    return reader_of(parts[-1]) is not None and not is_hidden(parts)


def is_hidden(parts: Sequence[str]) -> bool:
    """Return True if a file below a dataset's directory holds no rows, by its name, such as _SUCCESS."""
    return any(part.startswith((".", "_")) for part in parts)
