"""Formats of messages, and their registry: functions from the bytes of many messages to a batch of rows. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.sources.readers.json_lines import MAX_DEPTH, depth_of, read_json, with_nulls
from trainer.data.sources.times import text_as_times
from trainer.data.sources.types import plain_batch
from trainer.spec.messages import Messages

_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(), "float64": pa.float64(), "string": pa.string(), "bool": pa.bool_(),
    "timestamp": pa.timestamp("us"), "list<int64>": pa.list_(pa.int64()), "list<float64>": pa.list_(pa.float64()),
    "list<string>": pa.list_(pa.string()),
}  # fmt: skip


def schema_of(messages: Messages) -> pa.Schema:
    """Return the columns that are read, with their types."""
    return pa.schema([(name, _TYPES[type_]) for name, type_ in messages.columns.items()])


class UnreadableError(ValueError):
    """A message does not have the format that the dataset states."""


@dataclass(frozen=True)
class Decoded:
    """The rows of some messages.

    ``num_rows``: number of rows of each message [messages]. ``problems``: reasons why messages cannot be read, by their
    position; such a message has no rows.
    """

    batch: pa.RecordBatch
    num_rows: npt.NDArray[np.int64]
    problems: dict[int, str]


class MessageFormat(ABC):
    """A format in which messages of a topic are written.

    ``schema``: the columns that are read.
    """

    def __init__(self, schema: pa.Schema):
        self.schema = schema

    @abstractmethod
    def read(self, values: Sequence[bytes]) -> tuple[pa.Table, list[int]]:
        """Return the rows of messages that are all readable, and their numbers of rows.

        Raises:
            UnreadableError, pa.ArrowException, OSError: a message is not readable.
        """

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Return the rows of messages; a message without a value, a tombstone, has no rows."""
        num_rows = np.zeros(len(values), dtype=np.int64)
        problems: dict[int, str] = {}
        tables = [self.schema.empty_table()]
        there = [(number, value) for number, value in enumerate(values) if value is not None]
        work = [there] if there else []
        while work:
            part = work.pop()
            try:
                table, counts = self.read([value for _, value in part])
                table.validate(full=True)
            except (UnreadableError, pa.ArrowException, OSError) as error:
                if len(part) > 1:
                    # Messages are read all at once if none is bad; bad ones are found by bisection.
                    work += [part[len(part) // 2 :], part[: len(part) // 2]]
                else:
                    problems[part[0][0]] = (str(error).splitlines() or [type(error).__name__])[0]
                continue
            num_rows[[number for number, _ in part]] = counts
            tables.append(table)
        table = pa.concat_tables(tables).combine_chunks()
        batches = table.to_batches()
        batch = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=self.schema)
        return Decoded(plain_batch(batch), num_rows, problems)


class JsonLines(MessageFormat):
    """One JSON object in each line of a message."""

    name: ClassVar[str] = "json_lines"

    def read(self, values: Sequence[bytes]) -> tuple[pa.Table, list[int]]:
        lines_of = [[line for line in map(bytes.strip, value.split(b"\n")) if line] for value in values]
        lines = [line for lines in lines_of for line in lines]
        if not all(lines_of):
            raise UnreadableError("it is empty")
        # This excludes objects that span several lines, because no comma joins two lines.
        if not all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
            raise UnreadableError("a line is not one JSON object")
        block = with_nulls(b"\n".join(lines))
        # Arrow parses recursively: deep nesting would overflow the stack and kill the process.
        if depth_of(block) > MAX_DEPTH:
            raise UnreadableError(f"lists or objects are nested more than {MAX_DEPTH} deep")
        try:
            table = read_json(block, self.schema)
        except pa.ArrowInvalid:
            times = [number for number, type_ in enumerate(self.schema.types) if pa.types.is_timestamp(type_)]
            if not times:
                raise
            # Arrow cannot read nanoseconds as microseconds: read them as text and truncate them, as in files.
            as_text = self.schema
            for number in times:
                as_text = as_text.set(number, as_text.field(number).with_type(pa.string()))
            table = read_json(block, as_text).select(self.schema.names)
            for number in times:
                read = text_as_times(table.column(number)).cast(self.schema.types[number])
                table = table.set_column(number, self.schema.field(number), read)
        if table.num_rows != len(lines):
            raise UnreadableError("a line is not one JSON object")
        return table.select(self.schema.names), list(map(len, lines_of))


class ArrowStream(MessageFormat):
    """A stream of Arrow's IPC format in each message."""

    name: ClassVar[str] = "arrow"

    def read(self, values: Sequence[bytes]) -> tuple[pa.Table, list[int]]:
        tables = []
        for value in values:
            with pa.ipc.open_stream(pa.py_buffer(value)) as stream:
                table = stream.read_all()
            # The bytes are untrusted: a column's offsets may point outside its buffers.
            table.validate(full=True)
            lacking = [name for name in self.schema.names if table.schema.names.count(name) != 1]
            if lacking:
                raise UnreadableError(f"no column '{lacking[0]}', or several with that name")
            tables.append(table.select(self.schema.names).cast(self.schema))
        return pa.concat_tables(tables), [table.num_rows for table in tables]


FORMATS: dict[str, type[MessageFormat]] = {one.name: one for one in (JsonLines, ArrowStream)}


def format_of(messages: Messages) -> MessageFormat:
    """Return the reader of a topic's messages."""
    return FORMATS[messages.format](schema_of(messages))
