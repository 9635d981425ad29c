"""Encoding in one streaming pass over the source, the columns of a chunk side by side. Torch-free.

Codes are of each chunk's own distinct ids first (trainer.data.prepare.coding). Memory follows the number of distinct
ids and the chunk size, never the number of rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.labels import label_dtype, labels_of, row_weights_of, several_labels_of
from trainer.data.columns.numeric import read_number
from trainer.data.columns.point_in_time import PointInTime
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import Codes, encoded
from trainer.data.columns.weights import require_weighted
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import CODE, LABEL, VALUE, Appender
from trainer.data.prepare.bad_rows import BadRows
from trainer.data.prepare.coding import CodedColumn, CodedPart, TableIds
from trainer.data.prepare.plan import ColumnUse, DataPlan
from trainer.data.prepare.progress import Progress
from trainer.data.prepare.split_column import sides_of
from trainer.data.prepare.workers import Workers
from trainer.data.sources.join import JoinTable
from trainer.data.sources.source import Chunk, no_rows_in_window


@dataclass(frozen=True)
class Encoded:
    """Every row of the window, as codes into the ids of its domain (all splits together; -1 is null)."""

    num_rows: int
    codes: dict[str, Codes]  # by domain; ids ascending
    columns: dict[ColumnUse, npt.NDArray[np.int32] | Jagged]
    joined: dict[str, npt.NDArray[np.int32]]  # by join column of the rows and feature: position in the join file
    labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32] | None  # [rows], of several [rows, labels]
    row_weights: npt.NDArray[np.float32] | None  # where a column says them
    orders: dict[str, npt.NDArray[Any]]
    sides: npt.NDArray[np.uint8] | None  # where a column says them
    weights: dict[ColumnUse, npt.NDArray[np.float32]]  # of the values of lists that have them
    numeric: tuple[npt.NDArray[np.float64], ...]  # by numeric feature, as they come, NaN where missing

    def column(self, use: ColumnUse) -> npt.NDArray[np.int32]:
        codes = self.columns[use]
        assert not isinstance(codes, Jagged)
        return codes


def encode(
    plan: DataPlan,
    scratch: Path,
    workers: Workers,
    bad_rows: BadRows | None = None,
    log: Callable[[str], Any] = lambda message: None,
) -> Encoded:
    """Read the source once and leave the coded columns under ``scratch``.

    With ``bad_rows``, the rows that are bad are left out and recorded.

    Raises:
        DataError: the rows cannot be trained on; of the first chunk of rows in which some cannot.
    """
    progress = Progress(plan.source, log)
    with contextlib.closing(_EncodedWriter(plan, scratch, workers)) as writer:
        for chunk in plan.source.stream(plan.columns()):
            progress.add(len(chunk))
            writer.append(chunk if bad_rows is None else bad_rows.good(chunk))
        progress.end()
        if bad_rows is not None:
            bad_rows.close()
            bad_rows.check()
        if writer.num_rows == 0:
            if plan.source.window is not None:
                raise no_rows_in_window(plan.source.uri, plan.source.window)
            raise DataError("has no rows", where=plan.source.uri, remedy="point uri at data with rows")
        writer.times.check()
        return writer.encoded()


class _Step(NamedTuple):
    """What becomes of one column of a chunk: ``read`` in any thread, ``append`` in the order of chunks.

    ``group``: steps of one group append to the same things.
    """

    group: str
    read: Callable[[Chunk], Any]
    append: Callable[[Any], object]


class _EncodedWriter:
    """Files of coded columns under ``scratch``, to which chunks are appended."""

    def __init__(self, plan: DataPlan, scratch: Path, workers: Workers):
        self.num_rows = 0
        self.times = PointInTime(plan)
        self._plan, self._scratch, self._workers = plan, scratch, workers
        self._tables = {
            domain: TableIds(kind, scratch / f"places-{number}")
            for number, (domain, kind) in enumerate(plan.kinds.items())
        }
        for feature in plan.features:
            if feature.join is not None:
                plan.joins[feature.name].add_to(self._tables[feature.table].distinct)
        stems = {use: scratch / f"column-{number}" for number, use in enumerate(plan.uses)}
        self._uses = {use: CodedColumn(use, stem, self._tables[use.domain]) for use, stem in stems.items()}
        self._joined = {name: Appender(scratch / f"join-{name}", CODE) for name in plan.joins}
        self._numeric = [Appender(scratch / f"numeric-{number}", np.float64) for number in range(len(plan.numeric))]
        dataset = plan.dataset
        self._labels = None if dataset.negatives else Appender(scratch / "labels", label_dtype(dataset))
        self._row_weights = Appender(scratch / "row-weights", VALUE) if dataset.weight is not None else None
        self._sides = Appender(scratch / "sides", LABEL) if plan.job.evaluation.split.column is not None else None
        self._orders: dict[str, Appender] = {}
        self._steps = list(self._make_steps())

    def append(self, chunk: Chunk) -> None:
        """Append a chunk.

        Raises:
            DataError: a value cannot be used; of the first of the steps that fail, for any number of threads.
        """
        found = self._workers.map(lambda step: step.read(chunk), self._steps)
        groups: dict[str, list[Callable[[], object]]] = {}
        for step, value in zip(self._steps, found, strict=True):
            groups.setdefault(step.group, []).append(functools.partial(step.append, value))
        self._workers.map(lambda appends: [append() for append in appends], groups.values())
        self.num_rows += len(chunk)

    def _make_steps(self) -> Iterator[_Step]:
        plan = self._plan
        for use, writer in self._uses.items():
            kind = plan.kinds[use.domain]
            yield _Step(f"table {use.domain}", functools.partial(_coded, use=use, kind=kind), writer.append)
        yield _Step("times", self.times.look, _nothing)
        for column in plan.required:
            yield _Step("required", functools.partial(values.require_ids, column=column), _nothing)
        for one, appender in zip(plan.numeric, self._numeric, strict=True):
            yield _Step(f"number {one.name}", functools.partial(read_number, one), appender.append)
        for use, writer in self._uses.items():
            if writer.weights is not None:
                group = f"weights {use.column} {use.weights}"
                yield _Step(group, functools.partial(_weights, use=use), writer.weights.append)
        for feature in plan.features:
            if feature.join is not None:
                positions = functools.partial(_positions, join=plan.joins[feature.name], column=feature.join_on)
                yield _Step(f"join {feature.name}", positions, self._joined[feature.name].append)
        if self._labels is not None:
            yield _Step("labels", self._labels_of, self._labels.append)
        if self._row_weights is not None:
            weights = functools.partial(row_weights_of, column=str(plan.dataset.weight))
            yield _Step("row weights", weights, self._row_weights.append)
        if self._sides is not None:
            column = str(plan.job.evaluation.split.column)
            yield _Step("sides", functools.partial(sides_of, column=column), self._sides.append)
        for number, column in enumerate(plan.order_columns):
            yield _Step(f"order {column}", functools.partial(self._order, column=column, number=number), _append_to)

    def _labels_of(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Return the label of each row, or all of its labels, row by row."""
        dataset, least = self._plan.dataset, self._plan.least_labels
        if dataset.label is not None:
            return labels_of(chunk, dataset.label, least.get("label"))
        return several_labels_of(chunk, dataset.labels, least).reshape(-1)

    def _order(self, chunk: Chunk, column: str, number: int) -> tuple[Appender, npt.NDArray[Any]]:
        numbers = values.as_numbers(chunk, column, "order of rows")
        if column not in self._orders:
            self._orders[column] = Appender(self._scratch / f"order-{number}", numbers.dtype)
        order = self._orders[column]
        if order.dtype != numbers.dtype:
            raise DataError(
                f"is {numbers.dtype} here and {order.dtype} in an earlier file",
                where=chunk.where(column),
                remedy="write the column with one type in every file",
            )
        return order, numbers

    def _mapped_labels(self) -> npt.NDArray[Any] | None:
        if self._labels is None:
            return None
        labels, tasks = self._labels.mapped(), self._plan.tasks
        return labels.reshape(-1, len(tasks)) if tasks else labels

    def close(self) -> None:
        opened: list[Any] = [
            *self._numeric,
            self._labels,
            self._row_weights,
            self._sides,
            *self._tables.values(),
            *self._uses.values(),
        ]
        opened += [*self._joined.values(), *self._orders.values()]
        for appender in opened:
            if appender is not None:
                appender.close()

    def encoded(self) -> Encoded:
        """Close the files, and return what was appended, memory-mapped, with codes in the order of ids.

        Raises:
            DataError: a table has too many ids.
        """
        domains = list(self._tables)
        ranked = dict(
            zip(domains, self._workers.map(lambda name: self._tables[name].distinct.ranked(), domains), strict=True)
        )
        for domain, (ids, _) in ranked.items():
            if len(ids) > np.iinfo(CODE).max - 2:
                raise DataError(
                    f"{len(ids)} distinct ids are more than a table can hold (2^31 - 3)",
                    where=f"{self._plan.source.uri}, table '{domain}'",
                    remedy="hash the ids into fewer, or split the table",
                )
        self.close()
        self._workers.map(lambda use: self._uses[use].finish(ranked[use.domain][1]), self._uses)
        return Encoded(
            self.num_rows,
            {domain: Codes(ids) for domain, (ids, _) in ranked.items()},
            {use: writer.mapped() for use, writer in self._uses.items()},
            {name: appender.mapped() for name, appender in self._joined.items()},
            self._mapped_labels(),
            self._row_weights.mapped() if self._row_weights else None,
            {column: appender.mapped() for column, appender in self._orders.items()},
            self._sides.mapped() if self._sides else None,
            {use: writer.weights.mapped() for use, writer in self._uses.items() if writer.weights is not None},
            tuple(appender.mapped() for appender in self._numeric),
        )


def ids_of(chunk: Chunk, use: ColumnUse, kind: Kind) -> tuple[pa.Array, npt.NDArray[np.int64] | None]:
    """Return the raw ids of one column, and list lengths (None for plain ids)."""
    column = chunk.column(use.column)
    if use.is_list:
        elements, lengths = values.as_lists(column)
        return values.as_ids(elements, kind, chunk.where(use.column)), lengths
    return values.as_ids(column, kind, chunk.where(use.column)), None


def _coded(chunk: Chunk, use: ColumnUse, kind: Kind) -> CodedPart:
    ids, lengths = ids_of(chunk, use, kind)
    return CodedPart(*encoded(ids), lengths)


def _weights(chunk: Chunk, use: ColumnUse) -> npt.NDArray[np.float32]:
    return require_weighted(chunk, use).weights


def _positions(chunk: Chunk, join: JoinTable, column: str) -> npt.NDArray[np.int64]:
    return join.positions(chunk.column(column), chunk.where(column))


def _append_to(found: tuple[Appender, npt.NDArray[Any]]) -> None:
    found[0].append(found[1])


def _nothing(found: None) -> None:
    """Append nothing: the step only checks."""
