"""Parquet: footers say schema, rows and the range of integers. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.sources.locations import FilePath, opened
from trainer.data.sources.readers.base import Reader


class ParquetReader(Reader):
    name = "Parquet"
    suffixes = (".parquet", ".pq")
    remedy = "the file may be truncated or not Parquet: write it again"

    def read_schema(self, path: FilePath) -> pa.Schema:
        return pq.read_schema(opened(path))

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        # What is buffered ahead is kept until the file is closed: worth its memory where each read is a request.
        with pq.ParquetFile(opened(path), pre_buffer=not isinstance(path, Path)) as file:
            yield from file.iter_batches(chunk_rows, columns=columns, use_threads=True)

    def num_rows(self) -> int:
        return sum(pq.read_metadata(opened(path)).num_rows for path in self.paths)

    def integer_span(self, column: str) -> int | None:
        """Return max - min + 1 by the statistics of the row groups; None where one has none."""
        low: list[int] = []
        high: list[int] = []
        for path in self.paths:
            metadata = pq.read_metadata(opened(path))
            for group in range(metadata.num_row_groups):
                for number in range(metadata.num_columns):
                    chunk = metadata.row_group(group).column(number)
                    if chunk.path_in_schema != column:
                        continue
                    if chunk.statistics is None or not chunk.statistics.has_min_max:
                        return None
                    low.append(chunk.statistics.min)
                    high.append(chunk.statistics.max)
        return max(high) - min(low) + 1 if low else None
