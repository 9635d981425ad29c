"""Check that joined files and the item table have the keys that occur in the rows. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trainer.data.errors import DataError
from trainer.data.prepare.plan import DataPlan
from trainer.data.sources.item_table import ITEM_TABLE
from trainer.data.sources.join import join_name
from trainer.data.sources.key_matches import LEAST_FOUND, KeyMatches, column_with, likely_reason, shown


class JoinMatches:
    """Counter of the rows' keys that each joined file has or lacks, filled chunk by chunk.

    ``state``: result of :meth:`state` for earlier rows, to continue from; None: there are none.
    """

    def __init__(self, plan: DataPlan, state: Mapping[str, Any] | None = None):
        self._plan = plan
        self._by_join = {join_name(name): KeyMatches() for name in plan.joins}
        if state is not None:
            self.take_over(state)

    def add(self, name: str, matches: KeyMatches) -> None:
        """Add the counts of a chunk for the join with this :func:`join_name`."""
        self._by_join[name].add(matches)

    def state(self) -> dict[str, Any]:
        """Return the counts so far, as JSON."""
        return {name: asdict(one) for name, one in self._by_join.items()}

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Add the counts of other rows, as their counter's :meth:`state` returned them."""
        for name, one in state.items():
            self._by_join[name].add(KeyMatches(**one))

    def check(self) -> tuple[str, ...]:
        """Return a warning for each file that lacks the keys of more rows than ``max_unmatched`` allows.

        Raises:
            DataError: a file has the keys of nearly no rows.
        """
        plan, limit, warnings = self._plan, self._plan.dataset.max_unmatched, []
        for (name, on, column), features in self._files().items():
            found = self._by_join[join_name(name)]
            if not found.num_keys:
                where = f"{plan.source.uri}, column '{column}'"
                warnings.append(f"{where}: is null in every row, so nothing is joined ({', '.join(features)})")
            if not found.exceeds(limit):
                continue
            join = plan.joins[name]
            type_, own_type = plan.source.column_type(column), join.source.column_type(on)
            what = (
                f"joins {found.num_found:,} of {found.num_keys:,} rows ({', '.join(features)}): '{column}' of the rows "
                f"is {shown(found.unknown)} ({type_}), the file has {shown(join.keys)} ({own_type})"
            )
            reason = likely_reason(found.unknown, join.keys)
            other = None if reason is not None else column_with(found.unknown, join.source.uri, on)
            if other is not None:
                reason = f"its column '{other}' has them"
            where = f"{join.source.uri}, column '{on}'"
            if found.exceeds(max(limit, 1.0 - LEAST_FOUND)):
                raise DataError(
                    what,
                    where=where,
                    remedy=f"{reason or 'they name different things'}: write the keys of both files in one way, or set "
                    "max_unmatched: 1 of the dataset if so few are right",
                )
            warnings.append(f"{where}: {what}{'' if reason is None else f'; {reason}'}")
        return tuple(warnings)

    def _files(self) -> dict[tuple[str, str, str], list[str]]:
        """Return, for each joined file, the features that the model reads from it."""
        # The keys are (name of the file's first join, key column in the file, key column in the rows).
        plan = self._plan
        joins = [(one.name, one.join.on, one.join_on) for one in plan.trained if one.join is not None]
        if plan.items is not None:
            assert plan.dataset.items is not None
            joins.append((ITEM_TABLE, plan.dataset.items.on, plan.dataset.column_of("item")))
        first: dict[tuple[str, str, str], str] = {}
        found: dict[tuple[str, str, str], list[str]] = {}
        for name, on, column in joins:
            file = first.setdefault((plan.joins[name].source.uri, on, column), name)
            found.setdefault((file, on, column), []).append(name)
        return found
