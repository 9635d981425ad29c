"""Negatives of a dataset (``label: {negatives: ...}``), drawn once, and rows that have their columns. Torch-free.

A training row's negatives are items of training rows that its user did not have in training; if rows are split by time,
only items up to the row's own time are excluded. Items that the user has only in held-out rows can be drawn, because
training knows nothing of them. A held-out row's negatives are items that its user had in no split. Negatives occur in
training if the row's own item does; otherwise they do not. So a model that has learned nothing has an AUC of 1/2.

Three kinds of rows are left out: rows without an item, held-out rows whose (user, item) pair occurs in training, which
rankings of all items exclude too, and rows whose user had every item.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.columns.hashing import Int64s, UInt64s, below, derive_key, mix, random_words
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.negatives import UnseenUntil, popularity_weights
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import DROPPED, TRAIN

_NEGATIVES = 11


class _Pool(NamedTuple):
    """Items to draw: a sampler of places, the item at each place, each item's place (-1: none), items' weights."""

    # The last entry of place is the place of a missing item.

    draws: UnseenUntil
    items: Int64s
    place: Int64s
    weights: Int64s | None


class DrawnNegatives:
    """Sampler of negatives for all rows of a dataset with ``label: {negatives: ...}``.

    ``sides``: uint8 [rows], the split of each row; DROPPED if it is in none.
    """

    def __init__(self, plan: DataPlan, encoded: Encoded, sides: npt.NDArray[np.uint8]):
        spec = plan.dataset.negatives
        assert spec is not None
        user, item = plan.single("user"), plan.single(spec.of)
        self._spec = spec
        self._users, self.items = np.asarray(encoded.column(user)), np.asarray(encoded.column(item))
        ordering = plan.dataset.ordering
        self._times = np.asarray(encoded.order(ordering)) if plan.splits_by_time and ordering is not None else None
        num_users, num_items = len(encoded.codes[user.domain].ids), len(encoded.codes[item.domain].ids)
        in_split, has_item = sides != DROPPED, self.items >= 0
        self._is_training = (sides == TRAIN) & has_item
        counts = np.bincount(self.items[self._is_training], minlength=num_items)
        popular = spec.distribution == "popularity"
        weights = popularity_weights(counts, spec.power) if popular else None
        unknown = (np.bincount(self.items[has_item], minlength=num_items) > 0) & (counts == 0)
        self._pools = (
            self._pool(self._is_training, counts > 0, num_users, self._times, weights),
            self._pool(has_item, counts > 0, num_users, None, weights),
            self._pool(has_item, unknown, num_users, None, None),
        )
        """Items to draw for training rows, for held-out rows whose item is in training, and for other held-out rows."""
        self._pool_of = np.where(self._is_training, 0, np.where(np.append(counts, 0)[self.items] > 0, 1, 2))
        self._num_items, self._chosen = num_items, {True: self._is_training, False: has_item}
        self._rows: dict[bool, RowsOfItems] = {}
        repeats = in_split & has_item & self._repeats_training()
        exhausted = in_split & has_item & ~repeats
        exhausted[exhausted] = self._had_all(np.flatnonzero(exhausted))
        self.sides = np.where(has_item & ~repeats & ~exhausted, sides, DROPPED).astype(np.uint8)
        """Split of each row, uint8 [rows]; DROPPED for rows that are left out."""
        self._left_out = {
            "without an item": int((in_split & ~has_item).sum()),
            "held out although training has the same user and item": int(repeats.sum()),
            "whose user had every item that could be drawn": int(exhausted.sum()),
        }
        self._num_rows = int(in_split.sum())

    def _pool(
        self,
        rows: npt.NDArray[np.bool_],
        is_in: npt.NDArray[np.bool_],
        num_users: int,
        times: npt.NDArray[Any] | None,
        weights: Int64s | None,
    ) -> _Pool:
        """Return the pool of the items that ``is_in`` marks, excluding each user's items in the marked ``rows``."""
        items = np.flatnonzero(is_in)
        place = np.full(len(is_in) + 1, -1, dtype=np.int64)
        place[items] = np.arange(len(items))
        places = place[self.items]
        known = rows & (self._users >= 0) & (places >= 0)
        pairs = self._users[known].astype(np.int64) * len(items) + places[known]
        weights = None if weights is None else weights[items]
        of = None if times is None else times[known]
        return _Pool(UnseenUntil(pairs, of, num_users, len(items), weights), items, place, weights)

    def _repeats_training(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the held-out rows whose user and item occur together in a training row."""
        pool, repeats = self._pools[0], ~self._is_training & (self._users >= 0)
        rows = np.flatnonzero(repeats)
        places = pool.place[self.items[rows]]
        pairs, trained = self._users[rows].astype(np.int64) * len(pool.items) + places, pool.draws.pairs
        found = np.searchsorted(trained, pairs)
        inside = (places >= 0) & (found < len(trained))
        inside[inside] = trained[found[inside]] == pairs[inside]
        repeats[rows] = inside
        return repeats

    def _had_all(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of the given rows whose user had every item of the row's pool."""
        had_all = np.zeros(len(rows), dtype=bool)
        for number, pool in enumerate(self._pools):
            mine = self._pool_of[rows] == number
            users = self._users[rows]
            known = mine & (users >= 0)
            times = None if self._times is None or number else self._times[rows[known]]
            had_all[known] = pool.draws.has_none(users[known], times)
            # The only known item of a row without a user is its own, which is in the pool.
            had_all[mine & (users < 0)] = len(pool.items) < 2
        return had_all

    @property
    def per_positive(self) -> int:
        return self._spec.per_positive

    def in_words(self) -> str:
        """Return a line of text for the log; empty if no row was left out."""
        shown = [f"{count:,} {why}" for why, count in self._left_out.items() if count]
        return f"left out, of {self._num_rows:,} rows: {'; '.join(shown)}" if shown else ""

    def draw(self, rows: Int64s, positions: Int64s, *, needs_rows: bool) -> tuple[npt.NDArray[np.int32], Int64s]:
        """Return, for each negative, its item and the number of the row that gives the item's features.

        Args:
            rows: for each negative, the number of its positive row, which must be in a split.
            positions: a distinct number for each negative, which determines its draw.
            needs_rows: True to look up rows of the drawn items; False: each negative's own row is returned.
        """
        # Sort by user, for memory locality: a draw depends on its position only, not on the order.
        order = np.argsort(self._users[rows], kind="stable")
        rows, words = rows[order], random_words(derive_key(self._spec.seed, _NEGATIVES), positions[order])
        drawn = self._items(rows, words)
        from_rows = rows.copy() if not needs_rows else self._rows_of(drawn, rows, words)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return drawn[back].astype(np.int32), from_rows[back]

    def _items(self, rows: Int64s, words: UInt64s) -> Int64s:
        users, drawn = self._users[rows], np.empty(len(rows), dtype=np.int64)
        for number, pool in enumerate(self._pools):
            is_mine = self._pool_of[rows] == number
            mine = np.flatnonzero(is_mine & (users >= 0))
            times = None if self._times is None or number else self._times[rows[mine]]
            drawn[mine] = pool.items[pool.draws.draw(users[mine], times, words[mine])]
            # For a row without a user only its own item is known: any other item is a negative.
            mine = np.flatnonzero(is_mine & (users < 0))
            own = np.arange(len(mine)) * len(pool.items) + pool.place[self.items[rows[mine]]]
            others = UnseenUntil(own, None, len(mine), len(pool.items), pool.weights)
            drawn[mine] = pool.items[others.draw(np.arange(len(mine)), None, words[mine])]
        return drawn

    def _rows_of(self, items: Int64s, rows: Int64s, words: UInt64s) -> Int64s:
        """Return a row that gives each drawn item's features; for a training row, it is also a training row."""
        found = rows.copy()
        for of_training in (True, False):
            if of_training not in self._rows:
                chosen = self._chosen[of_training]
                self._rows[of_training] = RowsOfItems(self.items, chosen, self._times, self._num_items)
            mine = np.flatnonzero(self._is_training[rows] == of_training)
            times = None if self._times is None else self._times[rows[mine]]
            found[mine] = self._rows[of_training].at(items[mine], times, mix(words[mine]))
        return found


class RowsOfItems:
    """Lookup of a row by item and time: the item's latest row up to the time, else its first row.

    Without times, any row of the item is chosen at random.

    Args:
        items: the item of each row, [rows]; -1 if it has none.
        chosen: mask of the rows to choose from, [rows].
        times: the time of each row, [rows]; None without times.
        num_items: items are in [0, num_items).
    """

    def __init__(
        self,
        items: npt.NDArray[np.int32],
        chosen: npt.NDArray[np.bool_],
        times: npt.NDArray[Any] | None,
        num_items: int,
    ):
        rows = np.flatnonzero(chosen)
        of = items[rows].astype(np.int64)
        known = None if times is None else np.asarray(times[rows])
        order = np.argsort(of, kind="stable") if known is None else np.lexsort((known, of))
        self._rows = rows[order]
        self._starts = np.searchsorted(of[order], np.arange(num_items + 1))
        if known is not None:
            self._times = np.unique(known)
            self._keys = of[order] * (len(self._times) + 1) + np.searchsorted(self._times, known[order])

    def at(self, items: Int64s, times: npt.NDArray[Any] | None, words: UInt64s) -> Int64s:
        """Return the number of a row for each item; each item must have a row among the chosen rows."""
        first, end = self._starts[items], self._starts[items + 1]
        if times is None:
            return self._rows[first + below(words, end - first)]
        rank = np.searchsorted(self._times, times, side="right")
        place = np.searchsorted(self._keys, items * (len(self._times) + 1) + rank) - 1
        return self._rows[np.maximum(place, first)]
