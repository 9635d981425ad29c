"""Arrow's IPC formats: files, of which Feather is one, and streams. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from trainer.data.sources.locations import FilePath, opened, read_edges
from trainer.data.sources.readers.scanned import ScannedReader

_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_CONTINUES = b"\xff\xff\xff\xff"
_STOPS = bytes(4)


class FeatherReader(ScannedReader):
    name = "Feather"
    suffixes = (".feather", ".arrow", ".arrows", ".ipc")
    remedy = (
        "the file may be truncated, its writer not closed, or Feather 1: write it with pyarrow.feather.write_feather"
    )
    arrow_format = "IpcFileFormat"

    def read_schema(self, path: FilePath) -> pa.Schema:
        with self._batches(path) as batches:
            return batches.schema

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        with self._batches(path) as batches:
            read = pa.ipc.IpcReadOptions(included_fields=[batches.schema.get_field_index(name) for name in columns])
        with self._batches(path, read) as batches:
            is_stream = isinstance(batches, pa.ipc.RecordBatchStreamReader)
            for batch in batches if is_stream else map(batches.get_batch, range(batches.num_record_batches)):
                # In a damaged file, offsets may point outside the buffers. Arrow's scanner touches them before this.
                batch.validate(full=True)
                chosen = batch.select(columns)
                for start in range(0, chosen.num_rows, chunk_rows):
                    yield chosen.slice(start, chunk_rows)

    def rows_in(self, path: FilePath) -> int | None:
        return None if self._is_stream(path) else super().rows_in(path)

    def _is_stream(self, path: FilePath) -> bool:
        edges = read_edges(path, 8)
        head, tail = edges[:8], edges[-8:]
        if head.startswith(_FILE):
            return False
        if head.startswith(_FEATHER_1):
            raise self.unreadable(path, "it is Feather 1, which Arrow no longer reads")
        # Arrow takes the end of a truncated file for the end of the stream: rows would be missing, without an error.
        end = _CONTINUES + _STOPS if head.startswith(_CONTINUES) else _STOPS
        if not tail.endswith(end):
            raise self.unreadable(path, "it is neither an Arrow file nor a complete Arrow stream")
        return True

    def _batches(self, path: FilePath, options: pa.ipc.IpcReadOptions | None = None) -> Any:
        """Open a file or a stream; only of a stream can the batches be iterated."""
        open_it = pa.ipc.open_stream if self._is_stream(path) else pa.ipc.open_file
        return open_it(pa.OSFile(str(path)) if isinstance(path, Path) else opened(path), options=options)
