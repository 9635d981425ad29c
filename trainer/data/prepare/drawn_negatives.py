"""Negatives of a dataset (``label: {negatives: ...}``), drawn once, and the rows that give their columns. Torch-free.

A training row's negatives are items of training rows that its user did not have in training, up to the row's own time
where rows are split by time. A held-out click is drawn there like any other item, since nobody knew of it. A held-out
row's negatives are items of any row that its user had in no split; one whose own pair is in training is left out, as it
is from rankings of all items. Where pairs are split by hash, a pair that is drawn is one of the row's own split. So a
model that knows nothing has an AUC of 1/2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.hashing import Int64s, UInt64s, below, derive_key, mix, random_words
from trainer.data.errors import DataError
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.negatives import PopularUnseen, SeenItems, UnseenUntil, popularity_weights
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import DROPPED, TEST, TRAIN, VALIDATION

_NEGATIVES = 11
_MOST_DRAWS = 256
"""Draws for one negative, until its pair is of the row's own split; where none is, the last one stays."""

SidesOfPairs = Callable[[Int64s, Int64s], npt.NDArray[np.uint8]]


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
        self._users, self.items = encoded.column(user), encoded.column(item)
        ordering = plan.dataset.ordering
        self._times = encoded.orders[ordering] if plan.splits_by_time and ordering is not None else None
        num_users, num_items = len(self._user_ids), len(encoded.codes[item.domain].ids)
        items = np.asarray(self.items)
        in_training = (sides == TRAIN) & (items >= 0)
        counts = np.bincount(items[in_training], minlength=num_items)
        every = np.bincount(items[items >= 0], minlength=num_items)
        popular = spec.distribution == "popularity"
        weights = popularity_weights(counts, spec.power) if popular else (counts > 0).astype(np.int64)
        of_user = np.asarray(self._users) >= 0
        known = in_training & of_user
        is_held_out = of_user & (items >= 0) & ((sides == VALIDATION) | (sides == TEST))
        pairs = np.asarray(self._users).astype(np.int64) * num_items + items
        is_repeated = is_held_out & np.isin(pairs, pairs[known])
        self.sides = np.where(is_repeated, np.uint8(DROPPED), sides)
        """The split of each row, without held-out rows whose pair is in training."""
        self.num_repeated, self.num_held_out = int(is_repeated.sum()), int(is_held_out.sum())
        times = None if self._times is None else np.asarray(self._times[known])
        self._in_training = UnseenUntil(self._users[known], items[known], times, num_users, weights)
        known = (items >= 0) & of_user
        held_out = weights if popular else (every > 0).astype(np.int64)
        self._held_out = PopularUnseen(
            SeenItems.from_pairs(self._users[known], items[known], num_users, num_items), held_out
        )
        self._weights = {True: weights, False: held_out}
        self._rows = {True: RowsOfItems(items, in_training, self._times, num_items)}
        self._rows[False] = RowsOfItems(items, items >= 0, self._times, num_items)

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

    def draw(self, rows: Int64s, positions: Int64s) -> tuple[npt.NDArray[np.int32], Int64s]:
        """Return (an item, the row that it has its columns from) for negatives of ``rows``.

        Args:
            rows: the row that each negative is of, which is in a split.
            positions: a number of each negative, which no other one has: what is drawn is a function of it.

        Raises:
            DataError: there is no item left to draw.
        """
        words = random_words(derive_key(self._spec.seed, _NEGATIVES), positions)
        drawn = self._items(rows, words)
        left = np.arange(0 if self._side_of_pair is None else len(rows))
        for number in range(1, _MOST_DRAWS):
            if not len(left) or self._side_of_pair is None:
                break
            left = left[self._side_of_pair(rows[left], drawn[left]) != self.sides[rows[left]]]
            drawn[left] = self._items(rows[left], mix(words[left] + np.uint64(number)))
        from_rows = rows.copy()
        for is_training, of_items in self._rows.items():
            mine = np.flatnonzero((self.sides[rows] == TRAIN) == is_training)
            times = None if self._times is None else np.asarray(self._times[rows[mine]])
            from_rows[mine] = of_items.at(drawn[mine], times, mix(words[mine]))
        return drawn.astype(np.int32), from_rows

    def _items(self, rows: Int64s, words: UInt64s) -> Int64s:
        """Return an item for each row, chosen by ``words``."""
        users, sides = np.asarray(self._users[rows]), self.sides[rows]
        drawn = np.asarray(self.items[rows]).astype(np.int64)
        for is_training in (True, False):
            mine = np.flatnonzero(((sides == TRAIN) == is_training) & (users >= 0))
            if is_training:
                times = None if self._times is None else np.asarray(self._times[rows[mine]])
                drawn[mine], none = self._in_training.draw(users[mine], times, words[mine])
            else:
                drawn[mine] = self._held_out.draw(users[mine], words[mine])
                none = self._held_out.unseen_weight(users[mine]) <= 0
            if none.any():
                raise self._nothing_left(f"user {self._user_ids[int(users[mine[none][0]])]} had", is_training)
            # Of a row without a user nothing is known but its own item: any other is a negative.
            mine = np.flatnonzero(((sides == TRAIN) == is_training) & (users < 0))
            own, weights = np.flatnonzero(drawn[mine] >= 0), self._weights[is_training]
            others = PopularUnseen(SeenItems.from_pairs(own, drawn[mine][own], len(mine), len(weights)), weights)
            if (others.unseen_weight(np.arange(len(mine))) <= 0).any():
                raise self._nothing_left("a row without a user has", is_training)
            drawn[mine] = others.draw(np.arange(len(mine)), words[mine])
        return drawn

    def _nothing_left(self, who: str, is_training: bool) -> DataError:
        number = int((self._weights[is_training] > 0).sum())
        of = "of training" if is_training or self._spec.distribution == "popularity" else "of the rows"
        return DataError(
            f"{who} every one of the {number} items {of}: there is no negative to draw",
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
