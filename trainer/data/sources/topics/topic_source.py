"""A topic as a source of rows: its columns, and the rows of a segment in chunks. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.errors import DataError
from trainer.data.sources.locations import FilePath
from trainer.data.sources.readers.base import Reader
from trainer.data.sources.row_mask import RowFilter
from trainer.data.sources.source import Chunk, Source, SourceFile
from trainer.data.sources.topics.formats import Decoded, format_of, schema_of
from trainer.data.sources.topics.kafka import KafkaTopic
from trainer.data.sources.topics.segments import Segment
from trainer.spec import DatasetSpec, Follow


class DeclaredColumns(Reader):
    """Reader that knows the columns that a dataset declares for its messages, and reads no rows."""

    name = "messages"
    suffixes = ()
    remedy = "correct messages.columns"

    def __init__(self, uri: str, schema: pa.Schema):
        super().__init__(())
        self._uri, self._columns = uri, schema

    def read_schema(self, path: FilePath) -> pa.Schema:
        return self._columns

    def read_batches(self, path: FilePath, columns: list[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield nothing: rows are read by segments."""
        yield from ()

    def num_rows(self) -> int:
        return 0  # the number of messages to come is unknown

    def declared_type(self, column: str, *, strict: bool = False) -> pa.DataType:
        if column not in self._columns.names:
            raise DataError(
                f"no column '{column}' (there are {', '.join(sorted(self._columns.names))})",
                where=f"{self._uri}, messages.columns",
                remedy="name it there with its type, or another in the dataset spec",
            )
        return self._columns.field(column).type


class TopicSource(Source):
    """Source with the columns of a topic instead of files. This source yields no rows."""

    def __init__(self, dataset: DatasetSpec):
        assert dataset.messages is not None
        self.uri, self.window, self.is_file, self.files = dataset.uri, None, False, ()
        self.filter = None if dataset.filter is None else RowFilter(dataset.filter)
        self._version, self._hive = "", {}
        self._schema = schema_of(dataset.messages)
        self.reader = DeclaredColumns(dataset.uri, self._schema)

    def schema(self) -> pa.Schema:
        return self._schema

    def column_names(self) -> list[str]:
        return list(self._schema.names)


@dataclass(frozen=True, kw_only=True)
class MessageChunk(Chunk):
    """Rows of some messages of one partition; ``rows`` are their numbers in the segment.

    Attributes:
        offsets: offset of each message, [messages].
        first_rows: number of the first row of each message, [messages].
        problems: (offset, reason) of each message that could not be read.
    """

    partition: int
    offsets: npt.NDArray[np.int64]
    first_rows: npt.NDArray[np.int64]
    problems: tuple[tuple[int, str], ...]

    def where(self, column: str, position: int | None = None) -> str:
        """Return 'topic, partition, column c, offset', for errors."""
        at = "" if position is None else f", offset {self.offset_of(position)}"
        return f"{self.file.path.name}, partition {self.partition}{at}, column '{column}'"

    def offset_of(self, position: int) -> int:
        """Return the offset of the message that has the row at this position of the chunk."""
        return int(self.offsets[np.searchsorted(self.first_rows, self.rows[position], side="right") - 1])


class SegmentRows:
    """Reader of the rows of segments. To be closed.

    ``note`` is called with each message for the job's owner.
    """

    def __init__(self, dataset: DatasetSpec, follow: Follow, note: Callable[[str], None]):
        assert dataset.messages is not None
        self._kafka = KafkaTopic(dataset.uri, dataset.messages, follow, note)
        self._format = format_of(dataset.messages)
        self._filter = None if dataset.filter is None else RowFilter(dataset.filter)
        # Names the topic in error messages, instead of a file.
        self._file = SourceFile(Path(self._kafka.topic))

    def close(self) -> None:
        self._kafka.close()

    def chunks(self, segment: Segment, columns: Sequence[str], stopped: threading.Event) -> Iterator[MessageChunk]:
        """Yield the rows of a segment: partition by partition, each in the order of its offsets."""
        found: dict[int, list[tuple[npt.NDArray[np.int64], Decoded]]] = {}
        for partition, messages in self._kafka.read(segment.ranges, stopped):
            decoded = self._format.decode([value for _, value in messages])
            found.setdefault(partition, []).append((np.array([offset for offset, _ in messages], np.int64), decoded))
        row = 0
        for partition in sorted(found):
            for offsets, decoded in found.pop(partition):
                batch, num_rows = decoded.batch, decoded.num_rows
                starts = row + np.append(0, np.cumsum(num_rows))
                rows, row = np.arange(row, starts[-1]), int(starts[-1])
                if self._filter is not None:
                    passing = self._filter.passing(batch, f"{self._kafka.uri}, partition {partition}")
                    rows, batch = rows[passing], batch.take(pa.array(passing))
                told = tuple((int(offsets[position]), why) for position, why in sorted(decoded.problems.items()))
                # Messages without rows would hide the one whose rows begin at the same number.
                has_rows = num_rows > 0
                yield MessageChunk(
                    self._file, rows, batch.select(list(dict.fromkeys(columns))), row, len(told), partition=partition,
                    offsets=offsets[has_rows], first_rows=starts[:-1][has_rows], problems=told,
                )  # fmt: skip
