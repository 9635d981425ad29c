"""Delta Lake by the package deltalake: Parquet files, without files and rows that the log removed. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.sources.locations import FilePath, local_path
from trainer.data.sources.readers.base import Reader
from trainer.data.sources.readers.parquet import ParquetReader
from trainer.data.sources.readers.registry import holds_rows
from trainer.data.sources.tables.base import Parts, Snapshot, TableFile, TableFormat
from trainer.data.sources.types import fields_of

_LOG = "_delta_log"
_PARTITION = "partition."


class DeltaReader(ParquetReader):
    """The files of a table.

    ``declared``: the columns of the table; a file written before a column was added has nulls in it. ``kept``: for
    files with deleted rows, a mask of the rows that remain.
    """

    def __init__(
        self,
        paths: Sequence[FilePath],
        declared: Mapping[str, pa.DataType],
        kept: Mapping[FilePath, npt.NDArray[np.bool_]],
    ):
        super().__init__(paths)
        self.declared = dict(declared)
        self._kept = kept

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        kept, row = self._kept.get(path), 0
        for batch in super().read_batches(path, columns, chunk_rows):
            yield batch if kept is None else batch.filter(pa.array(kept[row : row + batch.num_rows]))
            row += batch.num_rows

    def read_batches_from(
        self, path: FilePath, columns: list[str], chunk_rows: int, first_row: int, stop_row: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        # Row groups count deleted rows too, so they can only be skipped in files without deleted rows.
        of = ParquetReader if self.passes_over_rows(path) else Reader
        return of.read_batches_from(self, path, columns, chunk_rows, first_row, stop_row)

    def passes_over_rows(self, path: FilePath) -> bool:
        return path not in self._kept

    def rows_in(self, path: FilePath) -> int:
        kept = self._kept.get(path)
        return super().rows_in(path) if kept is None else int(kept.sum())


class DeltaTable(TableFormat):
    name = "Delta Lake"
    extra = "delta"
    module = "deltalake"

    def root_of(self, parts: Parts) -> Parts | None:
        return parts[: parts.index(_LOG)] if _LOG in parts[:-1] else None

    def open(self, uri: str, files: Mapping[Parts, FilePath]) -> Snapshot:
        import deltalake

        table = deltalake.DeltaTable(str(local_path(uri).absolute()))
        mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
        if mapping != "none":
            what = f"is a table of {{name}} whose columns have other names in its files (column mapping by {mapping})"
            raise self.refused(uri, what, "rewrite it without column mapping")
        partitions = table.metadata().partition_columns
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        found = tuple(self._file(uri, one, partitions, files) for one in actions)
        declared = {".".join(path): type_ for path, type_ in fields_of(pa.schema(table.schema()))}
        types = {name: declared.pop(name) for name in partitions}
        has_deleted_rows = "deletionVectors" in (table.protocol().reader_features or [])
        kept = self._kept(uri, table, files) if has_deleted_rows else {}
        return Snapshot(f"version {table.version()}", found, lambda paths: DeltaReader(paths, declared, kept), types)

    def _file(
        self, uri: str, action: dict[str, object], partitions: Sequence[str], files: Mapping[Parts, FilePath]
    ) -> TableFile:
        name = str(action["path"])
        parts = next((one for one in (tuple(name.split("/")), tuple(unquote(name).split("/"))) if one in files), None)
        if parts is None or not holds_rows(parts):
            raise self.outside(uri, name)
        values = [(column, action[_PARTITION + column]) for column in partitions]
        return TableFile(parts, tuple((column, None if value is None else str(value)) for column, value in values))

    def _kept(self, uri: str, table: Any, files: Mapping[Parts, FilePath]) -> dict[FilePath, npt.NDArray[np.bool_]]:
        root = local_path(uri).absolute()
        by_path = {str(root.joinpath(*parts)): path for parts, path in files.items()}
        vectors = pa.table(table.deletion_vectors())
        kept = {}
        for name, mask in zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True):
            path = by_path.get(unquote(name.removeprefix("file://")))
            if path is None:
                raise self.outside(uri, name)
            kept[path] = mask.values.to_numpy(zero_copy_only=False)
        return kept
