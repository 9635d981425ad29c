"""Formats that Arrow scans as fragments of a dataset: the class that their readers derive from. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.fs as pafs

from trainer.data.sources.locations import FilePath, opened
from trainer.data.sources.readers.base import Reader

if TYPE_CHECKING:
    # Half a second to import: only for a dataset that is in such a format.
    import pyarrow.dataset as pads


class ScannedReader(Reader):
    """Files with a schema and a number of rows in their footers."""

    @staticmethod
    @abstractmethod
    def file_format() -> pads.FileFormat:
        """Return Arrow's scanner."""

    def read_schema(self, path: FilePath) -> pa.Schema:
        return self._fragment(path).physical_schema

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        # One batch ahead: memory follows the chunk, not the file.
        for batch in self._fragment(path).to_batches(columns=columns, batch_size=chunk_rows, batch_readahead=1):
            # Offsets in a damaged file would be followed anywhere.
            batch.validate(full=True)
            yield batch

    def num_rows(self) -> int:
        return sum(self._rows_of(path) for path in self.paths)

    def _rows_of(self, path: FilePath) -> int:
        with self.reading(path):
            return int(self._fragment(path).count_rows())

    def _fragment(self, path: FilePath) -> pads.Fragment:
        if isinstance(path, Path):
            return self.file_format().make_fragment(str(path), pafs.LocalFileSystem())
        return self.file_format().make_fragment(opened(path))
