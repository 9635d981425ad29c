"""Formats that Arrow scans as fragments of a dataset: the class that their readers derive from. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.fs as pafs

from trainer.data.sources.locations import FilePath, opened
from trainer.data.sources.readers.base import Reader


class ScannedReader(Reader):
    """Base class of readers of files that have a schema and a number of rows in their footers."""

    arrow_format: ClassVar[str]
    """Class in pyarrow.dataset; that module is only imported for datasets in such a format."""

    def read_schema(self, path: FilePath) -> pa.Schema:
        return self._fragment(path).physical_schema

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        # Read one batch ahead, so that memory grows with the chunk, not with the file.
        for batch in self._fragment(path).to_batches(columns=columns, batch_size=chunk_rows, batch_readahead=1):
            # In a damaged file, offsets may point outside the buffers.
            batch.validate(full=True)
            yield batch

    def rows_in(self, path: FilePath) -> int | None:
        return int(self._fragment(path).count_rows())

    def _fragment(self, path: FilePath) -> Any:
        import pyarrow.dataset

        scanner = getattr(pyarrow.dataset, self.arrow_format)()
        if isinstance(path, Path):
            return scanner.make_fragment(str(path), pafs.LocalFileSystem())
        return scanner.make_fragment(opened(path))


class OrcReader(ScannedReader):
    name = "ORC"
    suffixes = (".orc",)
    remedy = "the file may be truncated or not ORC: write it again"
    arrow_format = "OrcFileFormat"
