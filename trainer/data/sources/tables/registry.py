"""The table formats, and the detection of a folder's format. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.data.sources.locations import FilePath
from trainer.data.sources.tables.base import Parts, Snapshot, TableFormat
from trainer.data.sources.tables.delta import DeltaTable
from trainer.data.sources.tables.iceberg import IcebergTable

TABLE_FORMATS: tuple[TableFormat, ...] = (DeltaTable(), IcebergTable())


def snapshot_of(uri: str, files: Mapping[Parts, FilePath]) -> Snapshot | None:
    """Return the latest version of the table in a folder; None if it is a plain folder of files.

    Raises:
        DataError: the table cannot be read.
    """
    for table in TABLE_FORMATS:
        for parts in sorted(files):
            root = table.root_of(parts)
            if root is not None:
                return table.snapshot(uri, root, files)
    return None


def is_log(parts: Parts) -> bool:
    """Return True if the file at these parts of a path says which files belong to a table."""
    return any(table.is_log(parts) for table in TABLE_FORMATS)
