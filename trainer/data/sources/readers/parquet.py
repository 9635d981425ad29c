"""Parquet files, whose footers state the schema, the number of rows and the ranges of integers. Torch-free."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.sources.locations import FilePath, opened
from trainer.data.sources.readers.base import Reader


class ParquetReader(Reader):
    name = "Parquet"
    suffixes = (".parquet", ".pq")
    remedy = "the file may be truncated or not Parquet: write it again"
    reads_fields = True

    def read_schema(self, path: FilePath) -> pa.Schema:
        return pq.read_schema(opened(path))

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        with _file(path) as file:
            yield from file.iter_batches(chunk_rows, columns=columns, use_threads=True)

    def read_batches_from(
        self, path: FilePath, columns: list[str], chunk_rows: int, first_row: int, stop_row: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        with _file(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            stop_row = sum(sizes) if stop_row is None else min(stop_row, sum(sizes))
            groups, begin = list(range(len(sizes))), 0
            while groups and begin + sizes[groups[0]] <= first_row:
                begin += sizes[groups.pop(0)]
            while groups and sum(sizes[: groups[-1]]) >= stop_row:
                groups.pop()
            if not groups:
                return
            # Cut batches at the same rows as read_batches, if one of its batches begins at ``first_row``.
            skip, left, rest = first_row - begin, stop_row - first_row, pa.table({})
            for batch in file.iter_batches(chunk_rows, row_groups=groups, columns=columns, use_threads=True):
                taken = pa.Table.from_batches([batch.slice(min(skip, batch.num_rows), left)])
                skip, left = max(0, skip - batch.num_rows), left - taken.num_rows
                rest = pa.concat_tables([rest, taken]) if rest.num_columns else taken
                if rest.num_rows >= chunk_rows:
                    yield _one_batch(rest.slice(0, chunk_rows))
                    rest = rest.slice(chunk_rows)
            if rest.num_rows:
                yield _one_batch(rest)

    def passes_over_rows(self, path: FilePath) -> bool:
        return True

    def rows_in(self, path: FilePath) -> int:
        return int(pq.read_metadata(opened(path)).num_rows)

    def integer_span(self, column: str) -> int | None:
        """Return max - min + 1 by the statistics of the row groups; None if a row group has none, or wrong ones."""
        return self._spans.get(column)

    @functools.cached_property
    def _spans(self) -> dict[str, int]:
        """Spans of all columns of integers whose row groups have statistics, keyed by column."""
        # They are read in a process of its own, because pyarrow ends the process where they contradict the columns.
        command = [sys.executable, "-c", f"from {__name__} import print_spans; print_spans()"]
        done = subprocess.run(command, input=pickle.dumps(self.paths), capture_output=True, check=False)
        return {} if done.returncode else json.loads(done.stdout)


def print_spans() -> None:
    """Read paths from stdin, and print max - min + 1 of each column of integers as JSON."""
    files = [pq.read_metadata(opened(path)) for path in pickle.load(sys.stdin.buffer)]
    statistics: dict[str, list[Any]] = {}
    for metadata in files:
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.schema.column(number)
                if column.physical_type in ("INT32", "INT64"):
                    statistics.setdefault(column.path, []).append(metadata.row_group(group).column(number).statistics)
    spans = {
        name: max(one.max for one in known) - min(one.min for one in known) + 1
        for name, known in statistics.items()
        if all(one is not None and one.has_min_max and isinstance(one.min, int) for one in known)
    }
    print(json.dumps(spans))


def _file(path: FilePath) -> pq.ParquetFile:
    """Open a file; in object storage with read-ahead, which saves requests but keeps its buffers until the file closes.

    Times of 96 bits, which Spark writes, are read as microseconds: nanoseconds overflow from the year 2262 on.
    """
    return pq.ParquetFile(opened(path), pre_buffer=not isinstance(path, Path), coerce_int96_timestamp_unit="us")


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    return table.combine_chunks().to_batches()[0]
