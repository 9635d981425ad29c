"""Apache Iceberg by the package pyiceberg, which applies deletes and renamed columns file by file. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from trainer.data.sources.locations import FilePath, local_path
from trainer.data.sources.readers.base import Reader
from trainer.data.sources.tables.base import Parts, Snapshot, TableFile, TableFormat

_METADATA = "metadata"
_SUFFIX = ".metadata.json"
_VERSION = re.compile(r"^v?(\d+)")


class IcebergReader(Reader):
    """The data files of a snapshot, with the columns that the table has now.

    ``table`` is a pyiceberg object, ``tasks`` its tasks of scanning each file.
    """

    name = "Iceberg"
    suffixes = ()
    remedy = "check that the table is complete, or write its rows as plain Parquet files"

    def __init__(self, paths: Sequence[FilePath], table: Any, tasks: Mapping[FilePath, Any]):
        super().__init__(paths)
        self._table = table
        self._tasks = tasks

    def read_schema(self, path: FilePath) -> pa.Schema:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        return schema_to_pyarrow(self._table.schema(), include_field_ids=False)

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        projected = self._table.schema().select(*columns)
        scan = ArrowScan(self._table.metadata, self._table.io, projected, AlwaysTrue())
        for batch in scan.to_record_batches([self._tasks[path]]):
            chosen = batch.select(columns)
            for start in range(0, chosen.num_rows, chunk_rows):
                yield chosen.slice(start, chunk_rows)

    def rows_in(self, path: FilePath) -> int | None:
        task = self._tasks[path]
        return None if task.delete_files else int(task.file.record_count)


class IcebergTable(TableFormat):
    name = "Iceberg"
    extra = "iceberg"
    module = "pyiceberg.io.pyarrow"

    def root_of(self, parts: Parts) -> Parts | None:
        return parts[:-2] if parts[-2:-1] == (_METADATA,) and parts[-1].endswith(_SUFFIX) else None

    def is_log(self, parts: Parts) -> bool:
        return parts[-2:-1] == (_METADATA,)

    def open(self, uri: str, files: Mapping[Parts, FilePath]) -> Snapshot:
        from pyiceberg.table import StaticTable

        table = StaticTable.from_metadata(str(self._metadata(uri, files)))
        snapshot = table.current_snapshot()
        if snapshot is None:
            return Snapshot("empty", (), lambda paths: IcebergReader(paths, table, {}))
        root = local_path(uri).absolute()
        # Only files of the folder are opened: a table names its files by absolute paths, which anyone can write.
        self._parts(uri, root, snapshot.manifest_list, files)
        for manifest in snapshot.manifests(table.io):
            self._parts(uri, root, manifest.manifest_path, files)
        tasks: dict[FilePath, Any] = {}
        found = []
        for task in table.scan().plan_files():
            for one in task.delete_files:
                self._parts(uri, root, one.file_path, files)
            parts = self._parts(uri, root, task.file.file_path, files)
            if not task.file.file_path.endswith(".parquet"):
                raise self.refused(uri, f"is a table of {{name}} with {task.file.file_path}, not Parquet", "rewrite it")
            tasks[files[parts]] = task
            found.append(TableFile(parts))
        version = f"snapshot {snapshot.snapshot_id}, schema {table.schema().schema_id}"
        return Snapshot(version, tuple(found), lambda paths: IcebergReader(paths, table, tasks))

    def _metadata(self, uri: str, files: Mapping[Parts, FilePath]) -> FilePath:
        """Return the latest metadata file: as the hint file of tables without a catalog says, else by its number."""
        there = {parts[1]: path for parts, path in files.items() if self.root_of(parts) == ()}
        hint = files.get((_METADATA, "version-hint.text"))
        if isinstance(hint, Path) and (named := f"v{hint.read_text('utf-8').strip()}{_SUFFIX}") in there:
            return there[named]
        numbers = {name: int(match[1]) for name in there if (match := _VERSION.match(name))}
        latest = sorted(name for name in there if numbers.get(name) == max(numbers.values(), default=None))
        if len(latest) != 1:
            what = f"is a table of {{name}}, and {' and '.join(latest) or 'no file'} may be its latest metadata"
            raise self.refused(uri, what, "remove what its catalog does not name")
        return there[latest[0]]

    def _parts(self, uri: str, root: Path, named: str, files: Mapping[Parts, FilePath]) -> Parts:
        """Return the parts, below the folder, of the path of a file that the metadata name."""
        path = Path(
            unquote(named.removeprefix("file://")) if named.startswith("file://") else named.removeprefix("file:")
        )
        parts = path.relative_to(root).parts if path.is_relative_to(root) else None
        if parts is None or parts not in files:
            raise self.outside(uri, named)
        return parts
