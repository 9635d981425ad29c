"""Features whose column describes the row's item, found by looking: a drawn negative has them from its own item's rows.

For pairs of rows of one item by two users, and for pairs of any rows, compare how far their values agree: a and b. The
item's hold on a column is (a - b) / (1 - b), Cohen's kappa: 1 where the item determines it, 0 where it says nothing. Of
numbers it is 1 - d / e, the mean distances of ranks within an item and of any two rows. Torch-free.

Cohen, A coefficient of agreement for nominal scales, Educational and Psychological Measurement 1960.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.hashing import UInt64s, combine, mix, random_words, unit_interval
from trainer.data.columns.jagged import Jagged
from trainer.data.errors import DataError
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.plan import DataPlan

SAMPLE_ROWS = 400_000
"""About the number of rows that are compared, all of some items."""
DETERMINED, RELATED = 0.8, 0.25
"""Kappa from which on a column is the item's, and from which on the dataset has to say whether it is."""

Rows = npt.NDArray[np.int64]
ValuesAt = Callable[[Rows], npt.NDArray[Any]]
"""A column's values at rows: hashes, 0 where missing, or ranks, NaN where missing."""


@dataclass(frozen=True)
class ItemFeatures:
    """The features that a negative has from rows of its own item, and the kappa of each that was looked at."""

    names: frozenset[str] = frozenset()
    kappas: Mapping[str, float] = field(default_factory=dict)

    def in_words(self) -> str:
        """Return a line for the log, empty where no feature is the item's."""
        if not self.names:
            return ""
        shown = (f"{name} ({self.kappas[name]:.2f})" if name in self.kappas else name for name in sorted(self.names))
        return f"negatives have these features from rows of the drawn item: {', '.join(shown)}"


def item_features(plan: DataPlan, encoded: Encoded) -> ItemFeatures:
    """Find the features of the item, or take those that the dataset names.

    Raises:
        DataError: the rows leave open whether a feature is the item's.
    """
    spec, user = plan.dataset.negatives, plan.direct("user")
    assert spec is not None
    item = plan.direct(spec.of)
    assert item is not None
    assert user is not None
    if spec.item_features is not None:
        return ItemFeatures(frozenset(spec.item_features))
    columns = dict(_columns(plan, encoded))
    if not columns:
        return ItemFeatures()
    users, items = np.asarray(encoded.column(user)), np.asarray(encoded.column(item))
    share = SAMPLE_ROWS / max(1, len(items))
    there = (users >= 0) & (items >= 0)
    # Of random items all rows: pairs of one item are what is compared.
    sample = np.flatnonzero(there & ((share >= 1) | (unit_interval(mix(items.astype(np.uint64))) < share)))
    sample = sample[np.argsort(random_words(1, sample), kind="stable")]
    of_item, of_user = _pairs(items, users, sample), _pairs(users, items, sample)
    every = sample, np.roll(sample, 1)
    kappas, open_ones = {}, {}
    for name, values_at in columns.items():
        kappas[name] = kappa(values_at, of_item, every)
        by_user = kappa(values_at, of_user, every)
        if kappas[name] >= RELATED and (by_user >= DETERMINED) == (kappas[name] >= DETERMINED):
            open_ones[name] = by_user
    if open_ones:
        raise _undecided(plan, {name: (kappas[name], by_user) for name, by_user in open_ones.items()})
    return ItemFeatures(frozenset(name for name, value in kappas.items() if value >= DETERMINED), kappas)


def kappa(values_at: ValuesAt, same: tuple[Rows, Rows], every: tuple[Rows, Rows]) -> float:
    """Compute how far the item, or the user, that pairs of rows share determines a column: 0 not at all, 1 wholly.

    Args:
        values_at: the column.
        same: rows of pairs that share it; without any kappa is 0.
        every: rows of any pairs.
    """
    within, anywhere = (_disagreement(values_at(pairs[0]), values_at(pairs[1])) for pairs in (same, every))
    return 0.0 if not anywhere or within is None else max(0.0, 1.0 - within / anywhere)


def _disagreement(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> float | None:
    """Return the share of pairs that differ, of numbers the mean distance; None without pairs."""
    if left.dtype.kind == "f":
        distances = np.abs(left - right)
        distances = distances[~np.isnan(distances)]
        return float(distances.mean()) if len(distances) else None
    there = (left != 0) & (right != 0)
    return float((left != right)[there].mean()) if there.any() else None


def _pairs(of: npt.NDArray[np.int32], other: npt.NDArray[np.int32], sample: Rows) -> tuple[Rows, Rows]:
    """Return pairs of rows that agree in ``of`` and not in ``other``."""
    ordered = sample[np.argsort(of[sample], kind="stable")]
    left, right = ordered[:-1], ordered[1:]
    chosen = (of[left] == of[right]) & (other[left] != other[right])
    return left[chosen], right[chosen]


def _columns(plan: DataPlan, encoded: Encoded) -> Iterator[tuple[str, ValuesAt]]:
    """Yield (feature, its values at rows) of the features that neither the user nor the drawn item alone gives."""
    spec = plan.dataset.negatives
    assert spec is not None
    given = {plan.dataset.column_of(name) for name in ("user", spec.of)}
    for feature in plan.features:
        if feature.use is not None and feature.use.column not in given:
            yield feature.name, _Codes(encoded.columns[feature.use])
        elif feature.join is not None and feature.join_on not in given:
            yield feature.name, _Codes(encoded.joined[feature.name])
        elif feature.by is not None and feature.by.column not in given:
            yield feature.name, _Codes(encoded.columns[feature.by])
    for number, numeric in enumerate(plan.numeric):
        yield numeric.name, _Ranks(encoded.numeric[number])
    for vector in plan.row_vectors:
        yield vector.name, _Vectors(encoded.vectors[vector.name])


class _Codes:
    """Hashes of ids or of lists of ids."""

    def __init__(self, column: npt.NDArray[np.int32] | Jagged):
        self._column = column

    def __call__(self, rows: Rows) -> UInt64s:
        if not isinstance(self._column, Jagged):
            codes = np.asarray(self._column[rows]).astype(np.int64)
            return np.where(codes >= 0, codes + 1, 0).astype(np.uint64)
        lists = self._column.take(rows)
        lengths = lists.lengths
        place = np.arange(len(lists.values)) - np.repeat(lists.offsets[:-1], lengths)
        words = combine(lists.values.astype(np.uint64), place.astype(np.uint64))
        sums = np.zeros(len(rows), dtype=np.uint64)
        with np.errstate(over="ignore"):
            sums[lengths > 0] = np.add.reduceat(words, lists.offsets[:-1][lengths > 0]) if len(words) else 0
        return np.where(lengths > 0, sums | np.uint64(1), np.uint64(0))


class _Ranks:
    """Ranks of numbers among all rows, in [0, 1]."""

    def __init__(self, column: npt.NDArray[np.float64]):
        values = np.asarray(column)
        self._column = column
        self._ordered = np.sort(values[~np.isnan(values)])

    def __call__(self, rows: Rows) -> npt.NDArray[np.float64]:
        values = np.asarray(self._column[rows])
        low, high = (np.searchsorted(self._ordered, values, side=side) for side in ("left", "right"))
        return np.where(np.isnan(values), np.nan, (low + high) / (2.0 * max(1, len(self._ordered))))


class _Vectors:
    """Ranks of a fixed projection of vectors; zeros are missing."""

    def __init__(self, column: npt.NDArray[np.float32]):
        directions = unit_interval(random_words(2, np.arange(column.shape[1]))) - 0.5
        projected = np.asarray(column) @ directions
        self._ranks = _Ranks(np.where(np.asarray(column).any(axis=1), projected, np.nan))

    def __call__(self, rows: Rows) -> npt.NDArray[np.float64]:
        return self._ranks(rows)


def _undecided(plan: DataPlan, kappas: Mapping[str, tuple[float, float]]) -> DataError:
    shown = ", ".join(f"'{name}' (kappa {item:.2f}; of the user {user:.2f})" for name, (item, user) in kappas.items())
    names = ", ".join(kappas)
    return DataError(
        f"rows of one item mostly agree in {shown}: if a drawn item kept the clicked item's value, the model would "
        "learn whether the two belong together, and its AUC would say nothing",
        where=f"dataset '{plan.dataset.name}', label.negatives",
        remedy=f"set label: {{negatives: {{item_features: [{names}]}}}} with those that describe the item: a negative "
        "has them from its own item's rows. Leave out what is known before the item is, such as a query or a country "
        "([] for none). Or read them through items or a join on the item",
    )
