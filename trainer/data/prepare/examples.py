"""Making of examples from encoded rows: adds joined features, histories and negatives, assigns splits. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns import values
from trainer.data.columns.hashing import UInt64s, combine, id_keys, random_words
from trainer.data.columns.histories import PreviousValues
from trainer.data.columns.jagged import Jagged
from trainer.data.errors import DataError
from trainer.data.prepare import split as splits
from trainer.data.prepare.drawn_negatives import DrawnNegatives
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.item_features import ItemFeatures, item_features
from trainer.data.prepare.plan import DataPlan
from trainer.data.sources.item_table import ITEM_TABLE

CHUNK_ROWS = 1 << 18
NO_ID_KEY = 0x6E756C6C  # stands for a missing id in pair keys


@dataclass(frozen=True)
class Examples:
    """Consecutive examples. Features hold codes, numbers of their table's distinct ids (-1: missing), or lists."""

    features: dict[str, npt.NDArray[np.int32] | Jagged]  # and ITEM_TABLE: positions in it, where there is one
    labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32]  # [examples], or [examples, labels] of several labels
    sides: npt.NDArray[np.uint8]
    is_negative: npt.NDArray[np.bool_]  # whether the example was drawn as a negative
    rows: npt.NDArray[np.int64]  # number of each example's row in the data
    item_rows: npt.NDArray[np.int64]  # number of the row that gives the item's features; a negative has another row
    weights: dict[str, Jagged]  # by list feature that has weights


@dataclass(frozen=True)
class AllRows:
    """Facts about all rows that are needed to make the examples of a span of them.

    Attributes:
        first_row: number of the span's first row among all rows.
        time_limits: times that separate the splits of a split by time.
        names_validation: for a split by a column, True if the column marks any row of all as validation.
    """

    first_row: int = 0
    time_limits: splits.TimeLimits | None = None
    names_validation: bool | None = None


def limits_by_time(plan: DataPlan, order: npt.NDArray[Any]) -> splits.TimeLimits:
    """Return the times that separate the splits of a split by time, given the times of all rows.

    Raises:
        DataError: a split is left without rows, because rows of equal times all go to one split.
    """
    split, column = plan.job.evaluation.split, str(plan.dataset.ordering)
    limits = splits.time_limits(split, order)
    counts = np.bincount(limits.sides(order), minlength=len(splits.SPLIT_NAMES))
    asked = (len(order), int(len(order) * split.validation), int(len(order) * split.test))
    empty = [name for name, some, count in zip(splits.SPLIT_NAMES, asked, counts, strict=True) if some and not count]
    if empty:
        low, high = order.min(), order.max()
        shown = [plan.orders[column].shown(one) for one in (low, high)]
        last = int((order == high).sum())
        raise DataError(
            f"a split by time leaves no rows for {' and '.join(empty)}: times are from {shown[0]} to {shown[1]}, and "
            f"{last:,} of {len(order):,} rows have the last; rows of equal times get the same split",
            where=f"{plan.source.uri}, column '{column}'",
            remedy="name a column with finer times, set other shares in evaluation.split, or split by another kind",
        )
    return limits


class ExampleRows:
    """Examples from :class:`Encoded` rows, in row order; a positive is followed by its negatives.

    ``all_rows``: facts about all rows, if ``encoded`` holds only some; None: it holds all.
    """

    def __init__(self, plan: DataPlan, encoded: Encoded, all_rows: AllRows | None = None):
        self._plan = plan
        self._encoded = encoded
        self._all_rows = all_rows or AllRows()
        self._user, self._item = plan.direct("user"), plan.direct("item")
        self._joined = {
            feature.name: plan.joins[feature.name].coded(encoded.codes[feature.table], plan.kinds[feature.table])
            for feature in plan.features
            if feature.join is not None
        }
        self._weights = {
            feature.name: encoded.weights(feature.use)
            for feature in plan.features
            if feature.use is not None and feature.use.weights is not None
        }
        self._histories = self._make_histories()
        self._row_sides = self._sides_of_rows()
        # If the column names no validation rows, a share of the training rows validates.
        self._shares_validation = plan.job.evaluation.split.kind == "column" and not self._names_validation()
        self._pair_keys: dict[str, UInt64s] = {}
        self.negatives = self._make_negatives()
        """Sampler of negatives; None if the dataset draws none."""
        self.item_features = ItemFeatures() if self.negatives is None else item_features(plan, encoded)
        """Names of the features that a negative takes from a row of its own item."""
        self._follows_item = bool(self.item_features.names) or any(
            feature.by is not None and feature.by == plan.direct(plan.dataset.negatives.of)
            for feature in plan.features
            if plan.dataset.negatives is not None
        )

    def chunks(self) -> Iterator[Examples]:
        for start in range(0, self._encoded.num_rows, CHUNK_ROWS):
            yield self._build(start, min(start + CHUNK_ROWS, self._encoded.num_rows))

    def _build(self, start: int, stop: int) -> Examples:
        rows = np.arange(start, stop)
        features = {feature.name: self._feature(feature.name, start, stop) for feature in self._plan.features}
        if self._plan.items is not None:
            features[ITEM_TABLE] = np.asarray(self._encoded.joined(ITEM_TABLE)[start:stop])
        labels = self._plan.labels
        found = np.ones(len(rows), np.uint8) if labels is None else self._encoded.values[labels.name][start:stop]
        weights = {name: lists.part(start, stop) for name, lists in self._weights.items()}
        sides = self._sides(features, rows) if self.negatives is None else self.negatives.sides[start:stop].copy()
        sides[self._too_short(start, stop)] = splits.DROPPED
        examples = Examples(features, found, sides, np.zeros(len(rows), dtype=bool), rows, rows, weights)
        return examples if self.negatives is None else self._with_negatives(examples)

    def _feature(self, name: str, start: int, stop: int) -> npt.NDArray[np.int32] | Jagged:
        feature = self._plan.feature(name)
        assert feature is not None
        if feature.use is not None:
            column = self._encoded.columns[feature.use]
            return column.part(start, stop) if isinstance(column, Jagged) else np.asarray(column[start:stop])
        if feature.join is not None:
            return take(self._joined[name], np.asarray(self._encoded.joined(name)[start:stop]))
        return self._histories[name].rows(start, stop)

    def _make_histories(self) -> dict[str, PreviousValues]:
        made = {}
        for feature in self._plan.features:
            if feature.derive is not None:
                assert feature.by is not None
                assert feature.previous is not None
                made[feature.name] = PreviousValues(
                    self._encoded.column(feature.by),
                    self._encoded.order(feature.derive.order),
                    self._encoded.column(feature.previous),
                    feature.derive.length,
                )
        return made

    def _too_short(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        short = np.zeros(stop - start, dtype=bool)
        for feature in self._plan.features:
            if feature.derive is not None and feature.derive.min_length:
                short |= self._histories[feature.name].rows(start, stop).lengths < feature.derive.min_length
        return short

    def _make_negatives(self) -> DrawnNegatives | None:
        if self._plan.dataset.negatives is None:
            return None
        parts = []
        for start in range(0, self._encoded.num_rows, CHUNK_ROWS):
            rows = np.arange(start, min(start + CHUNK_ROWS, self._encoded.num_rows))
            names = [name for name in ("user", "item") if self._plan.direct(name) is not None]
            parts.append(self._sides({name: self._feature(name, start, len(rows) + start) for name in names}, rows))
        return DrawnNegatives(self._plan, self._encoded, np.concatenate(parts))

    def _with_negatives(self, examples: Examples) -> Examples:
        """Return the examples, each followed by its negatives, which are in the same split."""
        assert self.negatives is not None
        group = self.negatives.per_positive + 1
        repeat = np.repeat(np.arange(len(examples.rows)), group)
        is_negative = np.arange(len(repeat)) % group > 0
        rows, sides = examples.rows[repeat], examples.sides[repeat]
        drawn = np.flatnonzero(is_negative & (sides != splits.DROPPED))
        items, item_rows = np.asarray(self.negatives.items[rows]), rows.copy()
        items[drawn], item_rows[drawn] = self.negatives.draw(
            rows[drawn], rows[0] * group + drawn, needs_rows=self._follows_item
        )
        features = {name: take(column, repeat) for name, column in examples.features.items()}
        features.update(self._of_items(items, rows, item_rows))
        weights = {}
        for name, column in examples.weights.items():
            own = name in self.item_features.names
            weights[name] = self._weights[name].take(item_rows) if own else column.take(repeat)
        return Examples(features, (~is_negative).astype(np.uint8), sides, is_negative, rows, item_rows, weights)

    def _of_items(
        self, items: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], item_rows: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[np.int32] | Jagged]:
        """Return the features that items (codes) determine: user and time of ``rows``, the rest of ``item_rows``."""
        spec = self._plan.dataset.negatives
        assert spec is not None
        item = self._plan.single(spec.of)
        changed: dict[str, npt.NDArray[np.int32] | Jagged] = {}
        for feature in self._plan.features:
            of_item = feature.name in self.item_features.names
            if feature.use is not None and not feature.is_list and feature.use.column == item.column:
                changed[feature.name] = self._as_domain(items, item.domain, feature.table)
            elif feature.use is not None and of_item:
                changed[feature.name] = take(self._encoded.columns[feature.use], item_rows)
            elif feature.join is not None and feature.join_on == item.column:
                ids = self._encoded.codes[item.domain].ids
                positions = self._plan.joins[feature.name].positions(ids, f"table '{item.domain}'")
                changed[feature.name] = take(self._joined[feature.name], np.append(positions, -1)[items])
            elif feature.join is not None and of_item:
                positions = np.asarray(self._encoded.joined(feature.name)[item_rows])
                changed[feature.name] = take(self._joined[feature.name], positions)
            elif feature.by is not None and (of_item or feature.by.column == item.column):
                assert feature.derive is not None
                times = np.asarray(self._encoded.order(feature.derive.order)[rows])
                by = np.asarray(self._encoded.column(feature.by)[item_rows])
                changed[feature.name] = self._histories[feature.name].before(by, times)
        if self._plan.items is not None and item == self._item:
            positions = self._plan.items.lookup.positions(
                self._encoded.codes[item.domain].ids, f"table '{item.domain}'"
            )
            changed[ITEM_TABLE] = np.append(positions, -1)[items].astype(np.int32)
        return changed

    def _as_domain(self, codes: npt.NDArray[np.int32], source: str, target: str) -> npt.NDArray[np.int32]:
        if source == target:
            return codes
        ids = values.as_ids(self._encoded.codes[source].ids, self._plan.kinds[target], f"table '{target}'")
        return np.append(self._encoded.codes[target].encode(ids), -1)[codes].astype(np.int32)

    def _sides_of_rows(self) -> npt.NDArray[np.uint8] | None:
        """Return the split of each row, uint8 [rows], if a column or the time decides it; None for a random split."""
        split, ordering = self._plan.job.evaluation.split, self._plan.dataset.ordering
        if split.kind == "random":
            return None
        if self._plan.sides is not None:
            return self._encoded.values[self._plan.sides.name]
        assert ordering is not None
        order = self._encoded.order(ordering)
        if split.kind == "time":
            limits = self._all_rows.time_limits or limits_by_time(self._plan, order)
            return limits.sides(order)
        assert self._user is not None
        return splits.per_user_last(split, self._encoded.column(self._user), order)

    def _names_validation(self) -> bool:
        if self._all_rows.names_validation is not None:
            return self._all_rows.names_validation
        return self._row_sides is not None and bool((self._row_sides == splits.VALIDATION).any())

    def _sides(
        self, features: dict[str, npt.NDArray[np.int32] | Jagged], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        split = self._plan.job.evaluation.split
        if self._row_sides is None:
            sides = splits.random_split(split, self._pairs(features, rows))
        else:
            sides = self._row_sides[rows].copy()
            if self._shares_validation:
                by_hash = splits.random_split(split.model_copy(update={"test": 0.0}), self._pairs(features, rows))
                sides[(sides == splits.TRAIN) & (by_hash == splits.VALIDATION)] = splits.VALIDATION
        return sides

    def _pairs(self, features: dict[str, npt.NDArray[np.int32] | Jagged], rows: npt.NDArray[np.int64]) -> UInt64s:
        """Return a hash of each example's (user, item), or of its row number if the dataset lacks user or item."""
        keys = [random_words(0, rows + self._all_rows.first_row)]
        if self._user is not None and self._item is not None:
            keys = [self._keys_of(self._user.domain)[flat(features["user"])]]
            keys.append(self._keys_of(self._item.domain)[flat(features["item"])])
        return combine(*keys)

    def _keys_of(self, domain: str) -> UInt64s:
        if domain not in self._pair_keys:
            self._pair_keys[domain] = np.append(id_keys(self._encoded.codes[domain].ids), np.uint64(NO_ID_KEY))
        return self._pair_keys[domain]


def take(column: npt.NDArray[np.int32] | Jagged, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int32] | Jagged:
    return column.take(rows) if isinstance(column, Jagged) else column[rows]


def flat(column: npt.NDArray[np.int32] | Jagged) -> npt.NDArray[np.int32]:
    assert not isinstance(column, Jagged)
    return column
