"""Encoding in two streaming passes over the source: distinct ids, then codes on disk. Torch-free.

Memory follows the number of distinct ids and the chunk size, never the number of rows.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.labels import label_dtype, labels_of
from trainer.data.columns.numeric import read_numeric
from trainer.data.columns.point_in_time import PointInTime
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import Codes, DistinctIds
from trainer.data.columns.weights import require_weighted
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import CODE, LABEL, VALUE, Appender, JaggedAppender
from trainer.data.prepare.bad_rows import BadRows
from trainer.data.prepare.plan import ColumnUse, DataPlan
from trainer.data.prepare.split_column import sides_of
from trainer.data.sources.source import Chunk, no_rows_in_window


@dataclass(frozen=True)
class Encoded:
    """Every row of the window, as codes into the ids of its domain (all splits together; -1 is null)."""

    num_rows: int
    codes: dict[str, Codes]  # by domain; ids ascending
    columns: dict[ColumnUse, npt.NDArray[np.int32] | Jagged]
    joined: dict[str, npt.NDArray[np.int32]]  # by join column of the rows and feature: position in the join file
    labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32] | None
    orders: dict[str, npt.NDArray[Any]]
    sides: npt.NDArray[np.uint8] | None  # where a column says them
    weights: dict[ColumnUse, npt.NDArray[np.float32]]  # of the values of lists that have them
    numeric: npt.NDArray[np.float64]  # [rows, numeric features], as they come, NaN where missing

    def column(self, use: ColumnUse) -> npt.NDArray[np.int32]:
        codes = self.columns[use]
        assert not isinstance(codes, Jagged)
        return codes


def encode(plan: DataPlan, scratch: Path, bad_rows: BadRows | None = None) -> Encoded:
    """Read the source twice and leave the coded columns under ``scratch``.

    With ``bad_rows``, the rows that are bad are left out and recorded.

    Raises:
        DataError: the rows cannot be trained on.
    """
    distinct = {domain: DistinctIds(kind) for domain, kind in plan.kinds.items()}
    for feature, join in plan.joins.items():
        table = next(f.table for f in plan.features if f.name == feature)
        join.add_to(distinct[table])
    num_rows = 0
    columns = [use.column for use in plan.uses] or plan.columns()
    for chunk in plan.source.stream(columns if bad_rows is None else plan.columns()):
        if bad_rows is not None:
            chunk = bad_rows.good(chunk, record=True)
        num_rows += len(chunk)
        for use in plan.uses:
            distinct[use.domain].add(ids_of(chunk, use, plan.kinds[use.domain])[0])
    if bad_rows is not None:
        bad_rows.close()
        bad_rows.check()
    if num_rows == 0:
        if plan.source.window is not None:
            raise no_rows_in_window(plan.source.uri, plan.source.window)
        raise DataError("has no rows", where=plan.source.uri, remedy="point uri at data with rows")
    codes = {domain: Codes(found.sorted()) for domain, found in distinct.items()}
    for domain, found in codes.items():
        if len(found.ids) > np.iinfo(CODE).max - 2:
            raise DataError(
                f"{len(found.ids)} distinct ids are more than a table can hold (2^31 - 3)",
                where=f"{plan.source.uri}, table '{domain}'",
                remedy="hash the ids into fewer, or split the table",
            )
    return _second_pass(plan, codes, scratch, num_rows, bad_rows)


def _second_pass(
    plan: DataPlan, codes: dict[str, Codes], scratch: Path, num_rows: int, bad_rows: BadRows | None
) -> Encoded:
    times = PointInTime(plan)
    with contextlib.closing(_EncodedWriter(plan, codes, scratch)) as writer:
        for chunk in plan.source.stream(plan.columns()):
            if bad_rows is not None:
                chunk = bad_rows.good(chunk)
            times.look(chunk)
            for column in plan.required:
                values.require_ids(chunk, column)
            writer.append(chunk)
    times.check()
    return writer.encoded(num_rows)


class _EncodedWriter:
    """Files of coded columns under ``scratch``, to which chunks are appended."""

    def __init__(self, plan: DataPlan, codes: dict[str, Codes], scratch: Path):
        self._plan, self._codes, self._scratch = plan, codes, scratch
        stems = {use: scratch / f"column-{number}" for number, use in enumerate(plan.uses)}
        self._flat = {use: Appender(stem, CODE) for use, stem in stems.items() if not use.is_list}
        self._lists = {use: JaggedAppender(stem, CODE) for use, stem in stems.items() if use.is_list}
        self._weights = {
            use: Appender(stem.with_name(f"{stem.name}.weights"), VALUE) for use, stem in stems.items() if use.weights
        }
        self._joined = {name: Appender(scratch / f"join-{name}", CODE) for name in plan.joins}
        self._join_on = {feature.name: feature.join_on for feature in plan.features if feature.join is not None}
        self._numeric = Appender(scratch / "numeric", np.float64)
        self._labels = Appender(scratch / "labels", label_dtype(plan.dataset.label)) if plan.label_column else None
        self._split_column = plan.job.evaluation.split.column
        self._sides = Appender(scratch / "sides", LABEL) if self._split_column is not None else None
        self._orders: dict[str, Appender] = {}

    def append(self, chunk: Chunk) -> None:
        plan = self._plan
        self._numeric.append(read_numeric(plan.numeric, chunk).reshape(-1))
        for use in plan.uses:
            ids, lengths = ids_of(chunk, use, plan.kinds[use.domain])
            if use in self._weights:
                self._weights[use].append(require_weighted(chunk, use).weights)
            codes = self._codes[use.domain].encode(ids)
            if use.is_list:
                self._lists[use].append(codes, lengths)
            else:
                self._flat[use].append(codes)
        for name, on in self._join_on.items():
            self._joined[name].append(plan.joins[name].positions(chunk.column(on), chunk.where(on)))
        if self._labels is not None:
            self._labels.append(labels_of(chunk, plan.dataset.label))
        if self._sides is not None and self._split_column is not None:
            self._sides.append(sides_of(chunk, self._split_column))
        for column in plan.order_columns:
            self._append_order(chunk, column)

    def _append_order(self, chunk: Chunk, column: str) -> None:
        numbers = values.as_numbers(chunk, column, "order of rows")
        if column not in self._orders:
            self._orders[column] = Appender(self._scratch / f"order-{len(self._orders)}", numbers.dtype)
        order = self._orders[column]
        if order.dtype != numbers.dtype:
            raise DataError(
                f"is {numbers.dtype} here and {order.dtype} in an earlier file",
                where=chunk.where(column),
                remedy="write the column with one type in every file",
            )
        order.append(numbers)

    def close(self) -> None:
        groups = (self._flat, self._lists, self._weights, self._joined, self._orders)
        grouped = [appender for group in groups for appender in group.values()]
        for appender in [*grouped, self._numeric, self._labels, self._sides]:
            if appender is not None:
                appender.close()

    def encoded(self, num_rows: int) -> Encoded:
        """Return what was appended, memory-mapped; after :meth:`close`."""
        columns = {use: (self._lists if use.is_list else self._flat)[use].mapped() for use in self._plan.uses}
        return Encoded(
            num_rows,
            self._codes,
            columns,
            {name: appender.mapped() for name, appender in self._joined.items()},
            self._labels.mapped() if self._labels else None,
            {column: appender.mapped() for column, appender in self._orders.items()},
            self._sides.mapped() if self._sides else None,
            {use: appender.mapped() for use, appender in self._weights.items()},
            self._numeric.mapped().reshape(num_rows, len(self._plan.numeric)),
        )


def ids_of(chunk: Chunk, use: ColumnUse, kind: Kind) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the raw ids of one column, and list lengths (all 1 for plain ids)."""
    column = chunk.column(use.column)
    if use.is_list:
        elements, lengths = values.as_lists(column)
        return values.as_ids(elements, kind, chunk.where(use.column)), lengths
    return values.as_ids(column, kind, chunk.where(use.column)), np.ones(len(chunk), dtype=np.int64)
