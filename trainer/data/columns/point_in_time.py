"""Checks that no feature value is newer than its row, by the times that features declare. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.orders import Order, as_order, unit_of
from trainer.data.errors import DataError
from trainer.data.prepare.plan import DataPlan
from trainer.data.sources.source import Chunk
from trainer.data.sources.times import written

NUM_EXAMPLES = 3


class PointInTime:
    """Comparison of each row's time with the times at which its features became known, chunk by chunk.

    A feature's time is its ``timestamp``, a column of the rows, or its join's ``timestamp``, a column of the joined
    file. Times are compared only if the split is by ``time`` or ``per_user_last``.

    ``state``: :meth:`state` after earlier rows, to continue from; None: there are no earlier rows.
    """

    def __init__(self, plan: DataPlan, state: dict[str, Any] | None = None):
        self._plan, self._ordering = plan, str(plan.dataset.ordering)
        self._times = plan.feature_times
        self._num_late = dict.fromkeys([*self._times, *plan.join_times], 0)
        self._examples: list[str] = []
        if state is not None:
            self._num_late, self._examples = state["num_late"], state["examples"]

    def look(self, chunk: Chunk) -> None:
        """Compare the times of a chunk.

        Raises:
            DataError: times are missing, or of another kind than the rows'.
        """
        if not self._num_late:
            return
        rows = as_order(chunk, self._ordering, self._plan.orders[self._ordering])
        for feature, column in self._times.items():
            order = self._plan.orders[column]
            self._same_kind(feature, order, chunk.where(column))
            known = as_order(chunk, column, order, f"time of feature '{feature}'")
            self._compare(feature, chunk, rows, known, np.arange(len(chunk)))
        for feature, column in self._plan.join_times.items():
            join = self._plan.joins[feature]
            on = self._plan.join_on(feature)
            positions = join.positions(chunk.column(on), chunk.where(on))
            there = np.flatnonzero(positions >= 0)
            self._same_kind(feature, join.order, f"{join.source.uri}, column '{column}'")
            join.require_times(positions[there], f"time of feature '{feature}'")
            self._compare(feature, chunk, rows, join.times[0][positions[there]], there)

    def state(self) -> dict[str, Any]:
        """Return the findings so far, as JSON."""
        return {"num_late": self._num_late, "examples": self._examples}

    def take_over(self, state: dict[str, Any]) -> None:
        """Add the :meth:`state` of a comparison that read the rows after these."""
        for feature, count in state["num_late"].items():
            self._num_late[feature] += count
        self._examples += state["examples"][: NUM_EXAMPLES - len(self._examples)]

    def check(self) -> None:
        """Check all that was compared.

        Raises:
            DataError: a feature was known only after its row; the message has examples.
        """
        late = {feature: count for feature, count in self._num_late.items() if count}
        if not late:
            return
        counts = ", ".join(f"'{feature}' in {count:,} rows" for feature, count in late.items())
        raise DataError(
            f"features are from after the row that they describe: {counts}: {'; '.join(self._examples)}",
            where=self._plan.source.uri,
            remedy="take the value that was known at the row's time, or remove such rows or the feature; remove its "
            "timestamp if that is not the time at which the value became known",
        )

    def _compare(
        self, feature: str, chunk: Chunk, rows: npt.NDArray[Any], known: npt.NDArray[Any], places: npt.NDArray[np.int64]
    ) -> None:
        units = unit_of(rows), unit_of(known)
        if None not in units and units[0] != units[1]:
            raise DataError(
                f"the time of feature '{feature}' is in {units[1]} since 1970, such as {known[0]}, the rows' time is "
                f"in {units[0]}, such as {rows[0]}",
                where=chunk.where(self._ordering),
                remedy="write both in one unit",
            )
        late = np.flatnonzero(known > rows[places])
        self._num_late[feature] += len(late)
        timed = self._plan.orders[self._ordering].is_timed
        for one in late[: NUM_EXAMPLES - len(self._examples)]:
            row = int(places[one])
            when = f"known {(known[one] - rows[row]) / 1e6:g} s later" if timed else f"of {known[one]}"
            time = written(chunk.column(self._ordering), row)
            shown = f"{chunk.file.path.name}, row {chunk.rows[row]}: {self._ordering} {time}"
            self._examples.append(f"{shown}, '{feature}' {when}")

    def _same_kind(self, feature: str, order: Order, where: str) -> None:
        rows = self._plan.orders[self._ordering]
        if order.is_timed != rows.is_timed:
            raise DataError(
                f"the time of feature '{feature}' is a {order.kind}, which cannot be compared with a {rows.kind}, the "
                "order of rows",
                where=where,
                remedy="write both as times, or both as numbers of the same unit",
            )
