"""Detection of features that describe the row's item, which a drawn negative takes from rows of its own item.

Let d be the mean distance of a column's values in pairs of rows with the same item and different users, and e that in
pairs of any rows. The item determines the column to the degree 1 - d / e, Cohen's kappa: 1 wholly, 0 not at all. The
degree to which the column determines the item is found likewise, from pairs of rows with the same value. A column that
is no function of the item may still indicate it, as a variant or a query does. Only the dataset's owner knows if such a
column describes the item. Torch-free.

Cohen, A coefficient of agreement for nominal scales, Educational and Psychological Measurement 1960.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.columns.hashing import Int64s, UInt64s, combine, mix, random_words, unit_interval
from trainer.data.columns.jagged import Jagged
from trainer.data.errors import DataError
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.plan import DataPlan

SAMPLE_ROWS = 100_000
"""Approximate number of rows that are compared: all rows of randomly chosen items."""
LIST_PAIRS = 20_000
"""Largest number of pairs of lists that are compared."""
COORDINATES = 16
"""Largest number of a vector's coordinates that are compared."""
DETERMINED, RELATED = 0.8, 0.25
"""Kappa from which on a column counts as the item's; kappa from which on a doubtful column must be declared."""
ERRORS = 3.0
"""Number of standard errors by which kappa must exceed ``RELATED`` to count as more than chance."""


class Pairs(NamedTuple):
    """Pairs of rows, given by the numbers of their left and right rows, int64 [pairs] each."""

    left: Int64s
    right: Int64s


class Kappa(NamedTuple):
    """An estimate of kappa, and a lower bound that is ``ERRORS`` standard errors below it."""

    value: float = 0.0
    least: float = 0.0


@dataclass(frozen=True)
class ItemFeatures:
    """Names of the features that a negative takes from a row of its own item, and kappa of each examined feature."""

    names: frozenset[str] = frozenset()
    kappas: Mapping[str, float] = field(default_factory=dict)

    def in_words(self) -> str:
        """Return a line of text for the log; empty if no feature belongs to the item."""
        if not self.names:
            return ""
        shown = (f"{name} ({self.kappas[name]:.2f})" if name in self.kappas else name for name in sorted(self.names))
        return f"negatives have these features from rows of the drawn item: {', '.join(shown)}"


def item_features(plan: DataPlan, encoded: Encoded) -> ItemFeatures:
    """Return the features of the item: those that the dataset names, or else those detected in the rows.

    Raises:
        DataError: the rows leave open whether a feature describes the item.
    """
    spec = plan.dataset.negatives
    assert spec is not None
    if spec.item_features is not None:
        return ItemFeatures(frozenset(spec.item_features))
    users, items = (np.asarray(encoded.column(plan.single(name))) for name in ("user", spec.of))
    share = SAMPLE_ROWS / max(1, len(items))
    there = (users >= 0) & (items >= 0)
    # All rows of randomly chosen items, because pairs of rows of one item are compared.
    sample = np.flatnonzero(there & ((share >= 1) | (unit_interval(mix(items.astype(np.uint64))) < share)))
    sample = sample[np.argsort(random_words(1, sample), kind="stable")]
    users, items, rows = users[sample], items[sample], np.arange(len(sample))
    every = Pairs(rows, np.roll(rows, 1))
    of_item, of_user = _pairs(items, users, rows), _pairs(users, items, rows)
    kappas, open_ones = {}, {}
    for name, views in _columns(plan, encoded, sample):
        by_item = _most(kappa(values, of_item, every) for values in views)
        by_user = _most(kappa(values, of_user, every) for values in views).value
        of_value = (_pairs(values.keys(known), users, known) for values in views for known in [_known(values, rows)])
        tells = _most(kappa(Codes(items), pairs, every) for pairs in of_value)
        kappas[name] = by_item.value if by_item.least >= RELATED else 0.0
        is_related = max(by_item.least, tells.least) >= RELATED
        if is_related and (by_user >= DETERMINED) == (kappas[name] >= DETERMINED):
            open_ones[name] = f"'{name}' (kappa {by_item.value:.2f}; of the item {tells.value:.2f}, user {by_user:.2f})"
    if open_ones:
        raise _undecided(plan, open_ones)
    return ItemFeatures(frozenset(name for name, value in kappas.items() if value >= DETERMINED), kappas)


def kappa(values: Values, same: Pairs, every: Pairs) -> Kappa:
    """Return the degree to which something that pairs of rows share determines a column: 0 not at all, 1 wholly.

    Kappa is computed with and without missing values, and the greater result is returned.

    ``same``: pairs of rows that share it, such as the item; kappa is 0 if there are none. ``every``: pairs of any rows.
    """
    kappas = [Kappa()]
    for missing_count in (True, False):
        within, anywhere = (_distances(values, pairs, missing_count) for pairs in (same, every))
        if len(within) and anywhere.any():
            error = np.sqrt(max(float(within.var()), 1 / len(within)) / len(within))
            mean, of_any = float(within.mean()), float(anywhere.mean())
            kappas.append(Kappa(1 - mean / of_any, 1 - (mean + ERRORS * error) / of_any))
    return _most(kappas)


def _most(kappas: Iterable[Kappa]) -> Kappa:
    values, least = zip(*kappas, strict=True)
    return Kappa(max(values), max(least))


def _known(values: Values, rows: Int64s) -> Int64s:
    return rows[~values.are_missing(rows)]


def _distances(values: Values, pairs: Pairs, missing_count: bool) -> npt.NDArray[np.float64]:
    if not missing_count:
        there = ~(values.are_missing(pairs.left) | values.are_missing(pairs.right))
        pairs = Pairs(pairs.left[there], pairs.right[there])
    return values.distances(pairs)


def _pairs(shared: npt.NDArray[Any], other: npt.NDArray[np.int32], rows: Int64s) -> Pairs:
    """Return pairs of ``rows`` that agree in ``shared`` [rows] and differ in ``other``, indexed by row number."""
    order = np.argsort(shared, kind="stable")
    left, right = order[:-1], order[1:]
    chosen = (shared[left] == shared[right]) & (other[rows[left]] != other[rows[right]])
    return Pairs(rows[left[chosen]], rows[right[chosen]])


def _columns(plan: DataPlan, encoded: Encoded, sample: Int64s) -> Iterator[tuple[str, Sequence[Values]]]:
    """Yield (feature, views of its values at sampled rows) for features not read from the user's or item's column."""
    spec = plan.dataset.negatives
    assert spec is not None
    given = {plan.dataset.column_of(name) for name in ("user", spec.of)}
    for feature in plan.features:
        if feature.use is not None and feature.use.column not in given:
            column = encoded.columns[feature.use]
            views = [_view(column, sample)]
            if feature.use.weights is not None:
                assert isinstance(column, Jagged)
                views.append(Lists(column.take(sample), encoded.weights(feature.use).take(sample).values))
            yield feature.name, views
        elif feature.join is not None and feature.join_on not in given:
            yield feature.name, [_view(encoded.joined(feature.name), sample)]
        elif feature.by is not None and feature.by.column not in given:
            yield feature.name, [_view(encoded.columns[feature.by], sample)]
    for numeric in plan.numeric:
        yield numeric.name, [Numbers(np.asarray(encoded.values[numeric.name][sample]))]
    for vector in plan.row_vectors:
        vectors = np.asarray(encoded.values[vector.name][sample])
        some = np.unique(np.linspace(0, vectors.shape[1] - 1, COORDINATES).astype(int))
        is_missing = ~vectors.any(axis=1)
        yield vector.name, [Numbers(np.where(is_missing, np.nan, vectors[:, one])) for one in some]


def _view(column: npt.NDArray[np.int32] | Jagged, sample: Int64s) -> Values:
    return Lists(column.take(sample)) if isinstance(column, Jagged) else Codes(np.asarray(column[sample]))


class Codes:
    """Single ids as values: the distance of two is 0 if they are equal, else 1."""

    def __init__(self, column: npt.NDArray[np.int32]):
        self._column = column

    def distances(self, pairs: Pairs) -> npt.NDArray[np.float64]:
        return (self._column[pairs.left] != self._column[pairs.right]).astype(np.float64)

    def are_missing(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        return np.asarray(self._column[rows]) < 0

    def keys(self, rows: Int64s) -> UInt64s:
        return np.asarray(self._column[rows]).astype(np.uint64)


class Lists:
    """Lists of ids as values, with the distance of Bray and Curtis: the share of two lists' weight not in common.

    ``weights``: weights of the lists' elements; None: every weight is 1.
    """

    def __init__(self, column: Jagged, weights: npt.NDArray[np.float32] | None = None):
        self._column = column
        self._weights = None if weights is None else Jagged(weights, column.offsets)

    def distances(self, pairs: Pairs) -> npt.NDArray[np.float64]:
        if len(pairs.left) > LIST_PAIRS:
            some = np.linspace(0, len(pairs.left) - 1, LIST_PAIRS).astype(int)
            pairs = Pairs(pairs.left[some], pairs.right[some])
        places, codes, weights = [], [], []
        for sign, rows in ((1.0, pairs.left), (-1.0, pairs.right)):
            lists = self._column.take(rows)
            places.append(np.repeat(np.arange(len(rows)), lists.lengths))
            codes.append(lists.values.astype(np.int64))
            ones = np.ones(len(lists.values)) if self._weights is None else self._weights.take(rows).values
            weights.append(sign * np.nan_to_num(np.asarray(ones, dtype=np.float64)))
        place, code, weight = (np.concatenate(parts) for parts in (places, codes, weights))
        order = np.lexsort((code, place))
        place, code, weight = place[order], code[order], weight[order]
        first = np.flatnonzero(np.append(True, (np.diff(place) != 0) | (np.diff(code) != 0)))[: len(place)]
        of_pair = place[first]
        apart = np.bincount(of_pair, np.abs(np.add.reduceat(weight, first)), len(pairs.left)) if len(place) else 0.0
        whole = np.bincount(place, np.abs(weight), len(pairs.left))
        return np.where(whole > 0, apart / np.maximum(whole, 1e-12), 0.0)

    def are_missing(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        return self._column.offsets[rows] == self._column.offsets[rows + 1]

    def keys(self, rows: Int64s) -> UInt64s:
        lists = self._column.take(rows)
        lengths = lists.lengths
        place = np.arange(len(lists.values)) - np.repeat(lists.offsets[:-1], lengths)
        words = combine(lists.values.astype(np.uint64), place.astype(np.uint64))
        sums = np.zeros(len(rows), dtype=np.uint64)
        if len(words):
            sums[lengths > 0] = np.add.reduceat(words, lists.offsets[:-1][lengths > 0])
        return sums


class Numbers:
    """Numbers as values: the distance of two is the difference of their ranks among the compared rows, 0 to 1."""

    def __init__(self, column: npt.NDArray[np.floating[Any]]):
        self._column = column
        ordered = np.sort(column[~np.isnan(column)])
        low, high = (np.searchsorted(ordered, column, side=side) for side in ("left", "right"))
        self._ranks = (low + high) / (2.0 * max(1, len(ordered)))

    def distances(self, pairs: Pairs) -> npt.NDArray[np.float64]:
        apart = np.abs(self._ranks[pairs.left] - self._ranks[pairs.right])
        one, other = self.are_missing(pairs.left), self.are_missing(pairs.right)
        return np.where(one | other, (one != other).astype(np.float64), apart)

    def are_missing(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        return np.isnan(self._column[rows])

    def keys(self, rows: Int64s) -> UInt64s:
        return self._column[rows].astype(np.float64).view(np.uint64)


Values = Codes | Lists | Numbers
"""A feature's values at the compared rows.

``distances``: 0 to 1, for each pair of rows; a missing value equals only another one. ``keys``: a word of 64 bits for
each row's value; equal values have equal words.
"""


def _undecided(plan: DataPlan, features: Mapping[str, str]) -> DataError:
    return DataError(
        f"rows of one item mostly agree in {', '.join(features.values())}, or rows with one value mostly have one "
        "item. If a negative kept the clicked item's value, the model would learn whether a value and an item belong "
        "together, and its AUC would be useless",
        where=f"dataset '{plan.dataset.name}', label.negatives",
        remedy=f"set label: {{negatives: {{item_features: [{', '.join(features)}]}}}} with only those that "
        "describe the item ([] for none): a negative gets them from its own item's rows. Leave out features that do "
        "not depend on the item, such as a query or a country. Or read them through items or a join on the item",
    )
