"""Two streaming passes over the source: distinct ids, then codes on disk. Torch-free.

Memory follows the number of distinct ids and the chunk size, never the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data import values
from trainer.data.arrays import CODE, LABEL, Appender, JaggedAppender, map_array, map_jagged
from trainer.data.errors import DataError
from trainer.data.jagged import Jagged
from trainer.data.labels import labels_of
from trainer.data.plan import ColumnUse, DataPlan
from trainer.data.source import Chunk, no_rows_in_window
from trainer.data.values import Kind
from trainer.data.vocabulary import Codes, DistinctIds


@dataclass(frozen=True)
class Encoded:
    """Every row of the window, as codes into the ids of its domain (all splits together; -1 is null)."""

    num_rows: int
    codes: dict[str, Codes]  # by domain; ids ascending
    columns: dict[ColumnUse, npt.NDArray[np.int32] | Jagged]
    joined: dict[str, npt.NDArray[np.int32]]  # by join column of the rows and feature: position in the join file
    labels: npt.NDArray[np.uint8] | None
    orders: dict[str, npt.NDArray[Any]]

    def column(self, use: ColumnUse) -> npt.NDArray[np.int32]:
        found = self.columns[use]
        assert not isinstance(found, Jagged)
        return found


def encode(plan: DataPlan, scratch: Path) -> Encoded:
    """Reads the source twice and leaves the coded columns under ``scratch``. Raises DataError."""
    distinct = {domain: DistinctIds(kind) for domain, kind in plan.kinds.items()}
    for feature, join in plan.joins.items():
        table = next(f.table for f in plan.features if f.name == feature)
        join.add_to(distinct[table])
    num_rows = 0
    for chunk in plan.source.stream([use.column for use in plan.uses] or plan.columns()):
        num_rows += len(chunk)
        for use in plan.uses:
            distinct[use.domain].add(ids_of(chunk, use, plan.kinds[use.domain])[0])
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
    return _second_pass(plan, codes, scratch, num_rows)


def _second_pass(plan: DataPlan, codes: dict[str, Codes], scratch: Path, num_rows: int) -> Encoded:
    stems = {use: scratch / f"column-{number}" for number, use in enumerate(plan.uses)}
    flat = {use: Appender(stem, CODE) for use, stem in stems.items() if not use.is_list}
    lists = {use: JaggedAppender(stem, CODE) for use, stem in stems.items() if use.is_list}
    joined = {name: Appender(scratch / f"join-{name}", CODE) for name in plan.joins}
    labels = Appender(scratch / "labels", LABEL) if plan.label_column else None
    orders: dict[str, Appender] = {}
    join_on = {feature.name: feature.join_on for feature in plan.features if feature.join is not None}
    try:
        for chunk in plan.source.stream(plan.columns()):
            for use in plan.uses:
                ids, lengths = ids_of(chunk, use, plan.kinds[use.domain])
                encoded = codes[use.domain].encode(ids)
                if use.is_list:
                    lists[use].append(encoded, lengths)
                else:
                    flat[use].append(encoded)
            for name, on in join_on.items():
                joined[name].append(plan.joins[name].positions(chunk.column(on), chunk.where(on)))
            if labels is not None:
                labels.append(labels_of(chunk, plan.dataset.label))
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
        opened += [*lists.values(), *([labels] if labels else [])]
        for appender in opened:
            appender.close()
    columns: dict[ColumnUse, npt.NDArray[np.int32] | Jagged] = {}
    for use, stem in stems.items():
        columns[use] = map_jagged(stem, CODE) if use.is_list else map_array(stem, CODE)
    return Encoded(
        num_rows,
        codes,
        columns,
        {name: map_array(appender.path, CODE) for name, appender in joined.items()},
        map_array(labels.path, LABEL) if labels else None,
        {column: map_array(appender.path, appender.dtype) for column, appender in orders.items()},
    )


def ids_of(chunk: Chunk, use: ColumnUse, kind: Kind) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Raw ids of one column, and list lengths (all 1 for plain ids)."""
    column = chunk.column(use.column)
    if use.is_list:
        elements, lengths = values.as_lists(column)
        return values.as_ids(elements, kind, chunk.where(use.column)), lengths
    return values.as_ids(column, kind, chunk.where(use.column)), np.ones(len(chunk), dtype=np.int64)
