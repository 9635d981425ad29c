"""Encoding of all rows in one streaming pass over the source, the columns of a chunk in parallel. Torch-free.

Codes, numbers instead of ids, first count the distinct ids of their own chunk (trainer.data.prepare.coding). Memory
grows with the chunk size and, up to a limit, with the number of distinct ids, never with the number of rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.columns import values
from trainer.data.columns.base import Column
from trainer.data.columns.ids import IdColumn
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.orders import order_name, require_one_unit
from trainer.data.columns.point_in_time import PointInTime
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import Codes, encoded
from trainer.data.columns.weights import weights_name
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import CODE, Appender
from trainer.data.prepare.bad_rows import BadRows
from trainer.data.prepare.coding import CodedColumn, CodedPart, TableIds
from trainer.data.prepare.join_matches import JoinMatches
from trainer.data.prepare.part_cache import PartCache
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.progress import Progress
from trainer.data.prepare.workers import Workers
from trainer.data.sources.join import join_name
from trainer.data.sources.source import Chunk, Source, no_rows_of_days

PART_ROWS = 1 << 21
"""Number of rows after which the progress is saved: 5 to 10 s of work, which a killed preparation loses at most."""
IDS_BYTES = 1 << 29
"""Bytes of memory for the distinct ids of all tables together; beyond it the largest tables' ids go to disk."""


@dataclass(frozen=True)
class Encoded:
    """Encoded rows of all splits: column -> each id's position among the distinct ids of its domain, or -1 for null.

    A domain is a set of ids that columns share, such as a table.
    """

    num_rows: int
    codes: dict[str, Codes]  # by domain; ids ascending
    columns: dict[IdColumn, npt.NDArray[np.int32] | Jagged]
    values: Mapping[str, npt.NDArray[Any]]
    """Values by column name, [rows, *shape]; weights of lists have one value per id instead of one per row."""
    warnings: tuple[str, ...] = ()  # what the owner of the rows should know

    def column(self, use: IdColumn) -> npt.NDArray[np.int32]:
        codes = self.columns[use]
        assert not isinstance(codes, Jagged)
        return codes

    def joined(self, join: str) -> npt.NDArray[np.int32]:
        """Return the position of each row's key in a joined file, int32 [rows]; -1 if the file lacks it."""
        return self.values[join_name(join)]

    def order(self, column: str) -> npt.NDArray[Any]:
        return self.values[order_name(column)]

    def weights(self, use: IdColumn) -> Jagged:
        """Return the weights of the ids in a column of lists, as lists of the same lengths."""
        lists = self.columns[use]
        assert isinstance(lists, Jagged)
        return Jagged(self.values[weights_name(use)], lists.offsets)


def encode(plan: DataPlan, parts: PartCache, workers: Workers, bad_rows: BadRows | None, progress: Progress) -> Encoded:
    """Encode all rows, in one pass over the source, with the coded columns in files of ``parts``.

    Rows that an earlier attempt saved in ``parts`` are not read again. Progress is saved after every :data:`PART_ROWS`
    rows and at the end. With ``bad_rows``, bad rows are left out and recorded; with None they are errors.

    Raises:
        DataError: rows cannot be trained on; the first chunk with such rows decides the message.
    """
    with contextlib.closing(_EncodedWriter(plan, parts, workers, bad_rows)) as writer:
        progress.start_reading(plan.source, PART_ROWS, writer.num_read)
        if not writer.is_complete:
            for chunk in plan.source.stream(plan.columns(), start=writer.position):
                if writer.num_unsaved >= PART_ROWS:
                    writer.save()
                progress.add(len(chunk))
                writer.append(chunk)
            progress.end_reading()
        if bad_rows is not None:
            bad_rows.close()
            bad_rows.check()
        warnings = check_rows(plan, writer.num_rows, writer.times, writer.matches)
        if parts.state is not None and not writer.is_complete:
            writer.save(is_complete=True)
        encoded = replace(writer.encoded(), warnings=warnings)
        for column in plan.order_columns:
            check_order(plan, column, encoded.order(column))
        ordering = plan.dataset.ordering
        if plan.job.evaluation.split.kind == "per_user_last" and ordering is not None:
            times = encoded.order(ordering)
            if times[0] == times.min() == times.max():
                shown = plan.orders[ordering].shown(times[0])
                progress.log(f"every row has the {ordering} {shown}: per_user_last takes the rows as files have them")
        return encoded


def check_order(plan: DataPlan, column: str, order: npt.NDArray[Any]) -> None:
    """Check ``order``, the values of all rows in a column that orders rows.

    Raises:
        DataError: the values are numbers that are times since 1970 in different units.
    """
    if not plan.orders[column].is_timed:
        require_one_unit(order, f"{plan.source.uri}, column '{column}'")


def encode_span(
    plan: DataPlan, parts: PartCache, workers: Workers, bad_rows: BadRows | None, span: Span
) -> tuple[Encoded, dict[str, Any]]:
    """Encode the rows of a span, with the coded columns in files of ``parts``.

    Returns:
        The rows, with codes that number the span's own distinct ids; and the span's counts, as JSON: ``num_rows``,
        ``num_read``, and the states of ``times``, ``matches`` and ``bad_rows``. The caller checks the counts of all
        spans together.

    Raises:
        DataError: a row cannot be trained on.
    """
    with contextlib.closing(_EncodedWriter(plan, parts, workers, bad_rows)) as writer:
        for chunk in plan.source.stream(plan.columns(), start=span.start, stop=span.stop):
            writer.append(chunk)
        counted = {
            "num_rows": writer.num_rows,
            "num_read": writer.num_read,
            "times": writer.times.state(),
            "matches": writer.matches.state(),
            "bad_rows": None if bad_rows is None else bad_rows.state(),
        }
        return writer.encoded(), counted


def check_rows(plan: DataPlan, num_rows: int, times: PointInTime, matches: JoinMatches) -> tuple[str, ...]:
    """Check the counts of all rows, and return the warnings.

    Raises:
        DataError: there are no rows, values of features were known only after their rows' times, or a joined file has
            nearly none of the rows' keys.
    """
    if num_rows == 0:
        if plan.source.filter is not None:
            within = "" if plan.source.window is None else f" with {plan.source.window}"
            what = f"no row{within} passes the filter: {plan.source.filter}"
            raise DataError(what, where=plan.source.uri, remedy="correct filter of the dataset, or the window")
        if plan.source.window is not None:
            raise no_rows_of_days(plan.source)
        raise DataError("has no rows", where=plan.source.uri, remedy="point uri at data with rows")
    times.check()
    return matches.check()


class _Step(NamedTuple):
    """Work on one column, repeated for each chunk: ``read`` runs in any thread, ``append`` in the order of chunks."""

    # Steps with the same group append to the same files or tables, so they run append in turn.

    group: str
    read: Callable[[Chunk], Any]
    append: Callable[[Any], object]


class _EncodedWriter:
    """Writer that appends chunks to the files of coded columns in ``parts``."""

    def __init__(self, plan: DataPlan, parts: PartCache, workers: Workers, bad_rows: BadRows | None):
        saved = parts.state
        self.num_rows: int = saved["num_rows"] if saved else 0
        self.num_read: int = saved["num_read"] if saved else 0
        self.position: tuple[int, int] = (saved["position"][0], saved["position"][1]) if saved else (0, 0)
        """Number of the file to read next, and number of the row in it to read next."""
        self.is_complete = bool(saved and saved["is_complete"])
        self.num_unsaved = 0
        self.times = PointInTime(plan, saved["times"] if saved else None)
        self.matches = JoinMatches(plan, saved["matches"] if saved else None)
        self._plan, self._parts, self._workers, self._bad_rows = plan, parts, workers, bad_rows
        if saved and bad_rows is not None:
            bad_rows.restore(saved["bad_rows"])
        runs = saved["runs"] if saved else [0] * len(plan.kinds)
        self._tables = {
            domain: TableIds(kind, f"table-{number}", parts, runs[number])
            for number, (domain, kind) in enumerate(plan.kinds.items())
        }
        for feature in plan.features:
            if feature.join is not None and not saved:
                plan.joins[feature.name].add_to(self._tables[feature.table].distinct)
        chunks = saved["chunks"] if saved else [None] * len(plan.uses)
        self._uses = {
            use: CodedColumn(use, f"column-{number}", parts, self._tables[use.domain], chunks[number])
            for number, use in enumerate(plan.uses)
        }
        types = {one.name: one.dtype for one in plan.values if not one.type_of_first}
        files = saved["values"].items() if saved else types.items()
        self._values = {name: self._value_file(name, dtype) for name, dtype in files}
        self._steps = list(self._make_steps())

    def save(self, is_complete: bool = False) -> None:
        """Save the appended values and the position, so that a later attempt continues from here after a kill."""
        tables = list(self._tables.values())
        self._workers.map(lambda table: table.settle(), tables)
        self.is_complete, self.num_unsaved = is_complete, 0
        state = {
            "num_rows": self.num_rows,
            "num_read": self.num_read,
            "position": self.position,
            "is_complete": is_complete,
            "times": self.times.state(),
            "matches": self.matches.state(),
            "bad_rows": None if self._bad_rows is None else self._bad_rows.state(),
            "runs": [table.num_runs for table in tables],
            "chunks": [column.chunks for column in self._uses.values()],
            "values": {name: appender.dtype.str for name, appender in self._values.items()},
        }
        self._parts.save(state, self._workers, [] if self._bad_rows is None else self._bad_rows.files())

    def append(self, chunk: Chunk) -> None:
        """Append a chunk's rows; with a ``bad_rows`` writer, bad rows are left out."""
        self.position = self._plan.source.files.index(chunk.file, self.position[0]), chunk.end
        self.num_read += len(chunk)
        self.num_unsaved += len(chunk)
        chunk = chunk if self._bad_rows is None else self._bad_rows.good(chunk)
        found = self._workers.map(lambda step: step.read(chunk), self._steps)
        groups: dict[str, list[Callable[[], object]]] = {}
        for step, value in zip(self._steps, found, strict=True):
            groups.setdefault(step.group, []).append(functools.partial(step.append, value))
        self._workers.map(lambda appends: [append() for append in appends], groups.values())
        self.num_rows += len(chunk)
        while sum(table.distinct.num_bytes for table in self._tables.values()) > IDS_BYTES:
            max(self._tables.values(), key=lambda table: table.distinct.num_bytes).spill()

    def _make_steps(self) -> Iterator[_Step]:
        plan = self._plan
        for use, writer in self._uses.items():
            kind = plan.kinds[use.domain]
            yield _Step(f"table {use.domain}", functools.partial(_coded, use=use, kind=kind), writer.append)
        yield _Step("times", self.times.look, _nothing)
        for column in plan.required:
            yield _Step("required", functools.partial(values.require_ids, column=column), _nothing)
        for value in plan.values:
            read = functools.partial(_read, column=value)
            yield _Step(value.name, read, functools.partial(self._append_values, value))

    def _append_values(self, column: Column, found: tuple[Chunk, npt.NDArray[Any]]) -> None:
        chunk, values = found
        if not len(chunk):
            return
        if column.name not in self._values:
            self._values[column.name] = self._value_file(column.name, values.dtype)
        appender = self._values[column.name]
        if column.type_of_first and appender.dtype != values.dtype:
            raise DataError(
                f"is {values.dtype} here and {appender.dtype} in an earlier file",
                where=chunk.where(column.name.removeprefix("order ")),
                remedy="write the column with one type in every file",
            )
        matches = column.matches(chunk, values)
        if matches is not None:
            self.matches.add(column.name, matches)
        appender.append(values.reshape(-1))

    def _value_file(self, name: str, dtype: npt.DTypeLike) -> Appender:
        return self._parts.appender(self._plan.value_file(name), dtype)

    def close(self) -> None:
        self._parts.close()

    def encoded(self) -> Encoded:
        """Close the files, and return the appended columns, memory-mapped, with codes in ascending order of ids."""
        found = self._workers.map(lambda table: table.finish(IDS_BYTES // 16), self._tables.values())
        ids_of_tables = dict(zip(self._tables, found, strict=True))
        for domain, ids in ids_of_tables.items():
            if len(ids) > np.iinfo(CODE).max - 2:
                raise DataError(
                    f"{len(ids)} distinct ids are more than a table can hold (2^31 - 3)",
                    where=f"{self._plan.source.uri}, table '{domain}'",
                    remedy="hash the ids into fewer, or split the table",
                )
        self.close()
        durable = self._parts.state is not None
        self._workers.map(lambda column: column.finish(durable), self._uses.values())
        return Encoded(
            self.num_rows,
            {domain: Codes(ids) for domain, ids in ids_of_tables.items()},
            {use: writer.mapped() for use, writer in self._uses.items()},
            {
                one.name: self._values[one.name].mapped().reshape(-1, *one.shape)
                for one in self._plan.values
                if one.name in self._values
            },
        )


def _coded(chunk: Chunk, use: IdColumn, kind: Kind) -> CodedPart:
    ids, lengths = use.read(chunk, kind)
    return *encoded(ids), lengths


def _read(chunk: Chunk, column: Column) -> tuple[Chunk, npt.NDArray[Any]]:
    return chunk, column.read(chunk)


def _nothing(found: None) -> None:
    """Append nothing: the step only checks."""


SPAN_ROWS = 1 << 20
"""Largest number of rows in a span, if its file can be cut: the seconds of work that the loss of a host costs."""
_ALL = 1 << 62


class Span(NamedTuple):
    """Range of rows from ``start`` to ``stop`` (excluded), which are (number of a file, number of a row in it)."""

    start: tuple[int, int]
    stop: tuple[int, int]


def cut_spans(source: Source, span_rows: int) -> list[Span]:
    """Divide all rows of a source into spans, in the order of rows.

    A file that can be read from any row on is cut after each ``span_rows`` rows; small files share a span. If
    ``span_rows`` is a multiple of the chunk size, the spans' chunks are those of one stream over all rows.
    """
    spans: list[Span] = []
    size = span_rows
    for number, file in enumerate(source.files):
        count = source.reader.rows_in(file.path)
        if count is None:
            # The file's number of rows is unknown until it is read.
            spans.append(Span((number, 0), (number, _ALL)))
            size = span_rows
            continue
        step = span_rows if source.reader.passes_over_rows(file.path) else max(count, 1)
        for row in range(0, count, step):
            end = min(row + step, count)
            if spans and size + end - row <= span_rows:
                spans[-1] = spans[-1]._replace(stop=(number, end))
                size += end - row
            else:
                spans.append(Span((number, row), (number, end)))
                size = end - row
    return spans
