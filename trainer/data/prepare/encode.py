"""Encoding in two streaming passes over the source: distinct ids, then codes on disk. Torch-free.

Memory follows the number of distinct ids and the chunk size, never the number of rows.
"""

from __future__ import annotations

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
from trainer.data.prepare.arrays import CODE, LABEL, VALUE, Appender, JaggedAppender, map_array, map_jagged
from trainer.data.prepare.plan import ColumnUse, DataPlan
from trainer.data.prepare.split_column import sides_of
from trainer.data.sources.bad_rows import BadRows
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
        found = self.columns[use]
        assert not isinstance(found, Jagged)
        return found


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
    stems = {use: scratch / f"column-{number}" for number, use in enumerate(plan.uses)}
    flat = {use: Appender(stem, CODE) for use, stem in stems.items() if not use.is_list}
    lists = {use: JaggedAppender(stem, CODE) for use, stem in stems.items() if use.is_list}
    joined = {name: Appender(scratch / f"join-{name}", CODE) for name in plan.joins}
    weights = {
        use: Appender(stem.with_name(f"{stem.name}.weights"), VALUE) for use, stem in stems.items() if use.weights
    }
    numeric = Appender(scratch / "numeric", np.float64)
    labels = Appender(scratch / "labels", label_dtype(plan.dataset.label)) if plan.label_column else None
    split_column = plan.job.evaluation.split.column
    sides = Appender(scratch / "sides", LABEL) if split_column is not None else None
    orders: dict[str, Appender] = {}
    times = PointInTime(plan)
    join_on = {feature.name: feature.join_on for feature in plan.features if feature.join is not None}
    try:
        for chunk in plan.source.stream(plan.columns()):
            if bad_rows is not None:
                chunk = bad_rows.good(chunk)
            times.look(chunk)
            for column in plan.required:
                values.require_ids(chunk, column)
            numeric.append(read_numeric(plan.numeric, chunk).reshape(-1))
            for use in plan.uses:
                ids, lengths = ids_of(chunk, use, plan.kinds[use.domain])
                if use in weights:
                    weights[use].append(require_weighted(chunk, use).weights)
                encoded = codes[use.domain].encode(ids)
                if use.is_list:
                    lists[use].append(encoded, lengths)
                else:
                    flat[use].append(encoded)
            for name, on in join_on.items():
                joined[name].append(plan.joins[name].positions(chunk.column(on), chunk.where(on)))
            if labels is not None:
                labels.append(labels_of(chunk, plan.dataset.label))
            if sides is not None and split_column is not None:
                sides.append(sides_of(chunk, split_column))
            for column in plan.order_columns:
                numbers = values.as_numbers(chunk, column, "order of rows")
                if column not in orders:
                    orders[column] = Appender(scratch / f"order-{len(orders)}", numbers.dtype)
                if orders[column].dtype != numbers.dtype:
                    raise DataError(
                        f"is {numbers.dtype} here and {orders[column].dtype} in an earlier file",
                        where=chunk.where(column),
                        remedy="write the column with one type in every file",
                    )
                orders[column].append(numbers)
    finally:
        opened: list[Appender | JaggedAppender] = [*flat.values(), *joined.values(), *orders.values()]
        opened += [*weights.values(), numeric]
        opened += [*lists.values(), *([labels] if labels else []), *([sides] if sides else [])]
        for appender in opened:
            appender.close()
    times.check()
    columns: dict[ColumnUse, npt.NDArray[np.int32] | Jagged] = {}
    for use, stem in stems.items():
        columns[use] = map_jagged(stem, CODE) if use.is_list else map_array(stem, CODE)
    return Encoded(
        num_rows,
        codes,
        columns,
        {name: map_array(appender.path, CODE) for name, appender in joined.items()},
        map_array(labels.path, labels.dtype) if labels else None,
        {column: map_array(appender.path, appender.dtype) for column, appender in orders.items()},
        map_array(sides.path, LABEL) if sides else None,
        {use: map_array(appender.path, VALUE) for use, appender in weights.items()},
        map_array(numeric.path, np.float64).reshape(num_rows, len(plan.numeric)),
    )


def ids_of(chunk: Chunk, use: ColumnUse, kind: Kind) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the raw ids of one column, and list lengths (all 1 for plain ids)."""
    column = chunk.column(use.column)
    if use.is_list:
        elements, lengths = values.as_lists(column)
        return values.as_ids(elements, kind, chunk.where(use.column)), lengths
    return values.as_ids(column, kind, chunk.where(use.column)), np.ones(len(chunk), dtype=np.int64)
