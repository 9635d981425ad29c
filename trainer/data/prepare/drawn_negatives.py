"""Negatives of a dataset (``label: {negatives: ...}``), drawn once, and the rows that give their columns. Torch-free.

A training row's negatives are items of training rows that its user did not have in training, up to the row's own time
where rows are split by time. A held-out click is drawn there like any other item, since nobody knew of it. A held-out
row's negatives are items of any row that its user had in no split; one whose own pair is in training is left out, as it
is from rankings of all items. Where pairs are split by hash, a pair that is drawn is one of the row's own split. So a
model that knows nothing has an AUC of 1/2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.columns.hashing import Int64s, UInt64s, below, derive_key, mix, random_words
from trainer.data.errors import DataError
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.negatives import UnseenUntil, popularity_weights
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import DROPPED, TEST, TRAIN, VALIDATION

_NEGATIVES = 11
_MOST_DRAWS = 256
"""Draws for one negative, until its pair is of the row's own split; where none is, the last one stays."""

SidesOfPairs = Callable[[Int64s, Int64s], npt.NDArray[np.uint8]]


class _Unseen(NamedTuple):
    """Draws of places, the item at each place, the place of each item (-1: none; last: that of no item), weights."""

    draws: UnseenUntil
    items: Int64s
    place: Int64s
    weights: Int64s | None


class DrawnNegatives:
    """The negatives of all rows.

    Args:
        plan: which are drawn, and of what.
        encoded: all rows.
        sides: the split of each row, DROPPED where it is in none.
        side_of_pair: the split of (rows, items that take the place of theirs), where the hash of a pair says it; None:
            the row alone does.
    """

    def __init__(
        self,
        plan: DataPlan,
        encoded: Encoded,
        sides: npt.NDArray[np.uint8],
        side_of_pair: SidesOfPairs | None,
    ):
        spec, user = plan.dataset.negatives, plan.direct("user")
        assert spec is not None
        item = plan.direct(spec.of)
        assert item is not None
        assert user is not None
        self._side_of_pair = side_of_pair
        self._spec, self._where = spec, f"dataset '{plan.dataset.name}', label.negatives"
        self._user_ids = encoded.codes[user.domain].ids
        self._users, self.items = np.asarray(encoded.column(user)), np.asarray(encoded.column(item))
        ordering = plan.dataset.ordering
        self._times = np.asarray(encoded.orders[ordering]) if plan.splits_by_time and ordering is not None else None
        num_users, num_items = len(self._user_ids), len(encoded.codes[item.domain].ids)
        in_training, has_item = sides == TRAIN, self.items >= 0
        counts = np.bincount(self.items[in_training & has_item], minlength=num_items)
        popular = spec.distribution == "popularity"
        self._weights = popularity_weights(counts, spec.power) if popular else None
        everywhere = counts if popular else np.bincount(self.items[has_item], minlength=num_items)
        self._of_training = self._unseen(in_training, counts, num_users, self._times)
        self._of_held_out = self._unseen(np.ones(len(sides), dtype=bool), everywhere, num_users, None)
        self.sides, self.num_repeated, self.num_held_out = sides, 0, 0
        """The split of each row, without held-out rows whose pair is in training."""
        if side_of_pair is None or plan.job.evaluation.split.kind != "random":
            self._leave_repeated_out()
        self._num_items, self._chosen = num_items, {True: in_training & has_item, False: has_item}
        self._rows: dict[bool, RowsOfItems] = {}

    def _unseen(
        self, rows: npt.NDArray[np.bool_], counts: Int64s, num_users: int, times: npt.NDArray[Any] | None
    ) -> _Unseen:
        """Return the draws beside some rows, from items with a count."""
        items = np.flatnonzero(counts)
        place = np.full(len(counts) + 1, -1, dtype=np.int64)
        place[items] = np.arange(len(items))
        places = place[self.items]
        known = rows & (self._users >= 0) & (places >= 0)
        pairs = self._users[known].astype(np.int64) * len(items) + places[known]
        weights = None if self._weights is None else self._weights[items]
        of = None if times is None else times[known]
        return _Unseen(UnseenUntil(pairs, of, num_users, len(items), weights), items, place, weights)

    def _leave_repeated_out(self) -> None:
        is_held_out = (self.sides == VALIDATION) | (self.sides == TEST)
        places = self._of_training.place[self.items]
        rows = np.flatnonzero(is_held_out & (self._users >= 0) & (places >= 0))
        pairs = self._users[rows].astype(np.int64) * len(self._of_training.items) + places[rows]
        trained = self._of_training.draws.pairs
        found = np.searchsorted(trained, pairs)
        inside = found < len(trained)
        inside[inside] = trained[found[inside]] == pairs[inside]
        self.sides = self.sides.copy()
        self.sides[rows[inside]] = DROPPED
        self.num_repeated, self.num_held_out = int(inside.sum()), int(is_held_out.sum())

    @property
    def per_positive(self) -> int:
        return self._spec.per_positive

    def in_words(self) -> str:
        """Return a line for the log, empty where nothing was left out."""
        if not self.num_repeated:
            return ""
        share = self.num_repeated / self.num_held_out
        return (
            f"left out: {self.num_repeated:,} of {self.num_held_out:,} held-out rows ({share:.1%}), whose user and "
            "item are a pair of training, as no negative is"
        )

    def draw(self, rows: Int64s, positions: Int64s, *, needs_rows: bool) -> tuple[npt.NDArray[np.int32], Int64s]:
        """Return (an item, the row that it has its columns from) for negatives of ``rows``.

        Args:
            rows: the row that each negative is of, which is in a split.
            positions: a number of each negative, which no other one has: what is drawn is a function of it.
            needs_rows: whether columns are asked for; else each has those of its own row.

        Raises:
            DataError: there is no item left to draw.
        """
        # By users, whose items then lie side by side in memory: a draw is a function of its position alone.
        order = np.argsort(self._users[rows], kind="stable")
        rows, words = rows[order], random_words(derive_key(self._spec.seed, _NEGATIVES), positions[order])
        drawn = self._items(rows, words)
        left = np.arange(0 if self._side_of_pair is None else len(rows))
        for number in range(1, _MOST_DRAWS):
            if not len(left) or self._side_of_pair is None:
                break
            left = left[self._side_of_pair(rows[left], drawn[left]) != self.sides[rows[left]]]
            drawn[left] = self._items(rows[left], mix(words[left] + np.uint64(number)))
        from_rows = rows.copy() if not needs_rows else self._rows_of(drawn, rows, words)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return drawn[back].astype(np.int32), from_rows[back]

    def _items(self, rows: Int64s, words: UInt64s) -> Int64s:
        """Return an item for each row, chosen by ``words``."""
        users, is_training = self._users[rows], self.sides[rows] == TRAIN
        drawn = np.empty(len(rows), dtype=np.int64)
        for of_training, unseen in ((True, self._of_training), (False, self._of_held_out)):
            mine = np.flatnonzero((is_training == of_training) & (users >= 0))
            times = None if self._times is None or not of_training else self._times[rows[mine]]
            places, none = unseen.draws.draw(users[mine], times, words[mine])
            if none.any():
                raise self._nothing_left(f"user {self._user_ids[int(users[mine[none][0]])]} had", unseen)
            drawn[mine] = unseen.items[places]
            # Of a row without a user nothing is known but its own item: any other is a negative.
            mine = np.flatnonzero((is_training == of_training) & (users < 0))
            own = unseen.place[self.items[rows[mine]]]
            pairs = np.flatnonzero(own >= 0) * len(unseen.items) + own[own >= 0]
            others = UnseenUntil(pairs, None, len(mine), len(unseen.items), unseen.weights)
            places, none = others.draw(np.arange(len(mine)), None, words[mine])
            if none.any():
                raise self._nothing_left("a row without a user has", unseen)
            drawn[mine] = unseen.items[places]
        return drawn

    def _rows_of(self, items: Int64s, rows: Int64s, words: UInt64s) -> Int64s:
        """Return the row that each drawn item has its columns from: of training for a training row."""
        found, is_training = rows.copy(), self.sides[rows] == TRAIN
        for of_training in (True, False):
            if of_training not in self._rows:
                chosen = self._chosen[of_training]
                self._rows[of_training] = RowsOfItems(self.items, chosen, self._times, self._num_items)
            mine = np.flatnonzero(is_training == of_training)
            times = None if self._times is None else self._times[rows[mine]]
            found[mine] = self._rows[of_training].at(items[mine], times, mix(words[mine]))
        return found

    def _nothing_left(self, who: str, unseen: _Unseen) -> DataError:
        of_rows = unseen is self._of_held_out and self._spec.distribution == "uniform"
        return DataError(
            f"{who} every one of the {len(unseen.items)} items of {'the rows' if of_rows else 'training'}: "
            "there is no negative to draw",
            where=self._where,
            remedy="leave such users out, hold less out, or use label: column or rule",
        )


class RowsOfItems:
    """A row for an item and a time: the item's latest up to that time, else its first; without times any of its rows.

    Args:
        items: the item of each row, -1 where it has none [rows].
        chosen: which rows there are to choose from [rows].
        times: of each row; None: there are none.
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
        """Return a row for each item, which has one among the chosen."""
        first, end = self._starts[items], self._starts[items + 1]
        if times is None:
            return self._rows[first + below(words, end - first)]
        rank = np.searchsorted(self._times, times, side="right")
        place = np.searchsorted(self._keys, items * (len(self._times) + 1) + rank) - 1
        return self._rows[np.maximum(place, first)]
