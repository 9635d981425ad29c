"""Items that a user never had, uniform or by popularity, without rejection. Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.columns.hashing import Int64s, UInt64s, below
from trainer.data.columns.jagged import sorted_unique


class SeenItems:
    """Which items each user had, as one sorted array of ``user * num_items + item``; may be memory-mapped.

    With a user's items sorted as s_0 < s_1 < ..., the k-th item (from 0) that is not among them is
    k + |{i: s_i - i <= k}|. ``shifted`` holds user * num_items + (s_i - i), which is sorted too, so one binary search
    per draw answers it.
    """

    def __init__(self, shifted: Int64s, starts: Int64s, num_items: int):
        self.shifted = shifted
        self.starts = starts
        self.num_items = num_items

    @staticmethod
    def from_pairs(
        users: npt.NDArray[np.integer], items: npt.NDArray[np.integer], num_users: int, num_items: int
    ) -> SeenItems:
        """Build from (user, item) pairs in any order, repeats allowed.

        Users are in [0, num_users), items in [0, num_items).
        """
        pairs = sorted_unique(users.astype(np.int64) * num_items + items.astype(np.int64))
        starts = np.searchsorted(pairs, np.arange(num_users + 1) * num_items)
        rank = np.arange(len(pairs)) - np.repeat(starts[:-1], np.diff(starts))
        return SeenItems(pairs - rank, starts, num_items)

    def with_one(self, items: npt.NDArray[np.integer]) -> SeenItems:
        """Return as many users as there are ``items``, each of whom had one of these; -1: none."""
        users = np.flatnonzero(items >= 0)
        return SeenItems.from_pairs(users, items[users], len(items), self.num_items)

    def num_unseen(self, users: npt.NDArray[np.integer]) -> Int64s:
        return self.num_items - (self.starts[users + 1] - self.starts[users])

    def draw(self, users: npt.NDArray[np.integer], words: UInt64s) -> Int64s:
        """Return one item per user, uniform over the items that the user never had, chosen by ``words``.

        A user who had every item gets any item: callers that cannot accept that check :meth:`num_unseen`.
        """
        users = users.astype(np.int64)
        unseen = self.num_unseen(users)
        had_all = unseen <= 0
        chosen = below(words, np.where(had_all, self.num_items, unseen))
        before = np.searchsorted(self.shifted, users * self.num_items + chosen, side="right") - self.starts[users]
        return np.where(had_all, chosen, chosen + before)

    def pairs(self) -> tuple[Int64s, Int64s]:
        """Return (users, items) of what they had, ascending."""
        lengths = np.diff(self.starts)
        users = np.repeat(np.arange(len(lengths)), lengths)
        rank = np.arange(len(self.shifted)) - np.repeat(self.starts[:-1], lengths)
        return users, np.asarray(self.shifted) - users * self.num_items + rank


class KnownPairs:
    """Whether a user had an item, by rows of the tables of both.

    Args:
        seen: what each user had.
        rows: the table row of each of its items.
    """

    def __init__(self, seen: SeenItems, rows: npt.NDArray[np.integer]):
        users, items = seen.pairs()
        self._width = int(rows.max(initial=0)) + 1
        self._pairs = np.sort(users * self._width + rows[items])

    def had(self, users: npt.NDArray[np.integer], items: Int64s) -> npt.NDArray[np.bool_]:
        """Return for each pair of table rows whether the user had the item."""
        inside = items < self._width
        if not len(self._pairs):
            return np.zeros(len(items), dtype=bool)
        pairs = users.astype(np.int64) * self._width + items
        index = np.searchsorted(self._pairs, pairs)
        return inside & (index < len(self._pairs)) & (self._pairs[np.minimum(index, len(self._pairs) - 1)] == pairs)


class PopularUnseen:
    """The same draws with probabilities proportional to integer weights of the items (:func:`popularity_weights`).

    With C_j the sum of the weights before item j, and a user's items s_0 < s_1 < ..., the weight of what the user never
    had before s_i is C_{s_i} - sum of the weights of s_0 .. s_{i-1}. It ascends with i, so that one binary search says
    how much of the user's own lies before a number drawn below the weight of all unseen, and a second one which item
    that is. With weights of 1 this is :class:`SeenItems`.
    """

    def __init__(self, seen: SeenItems, weights: Int64s):
        users, items = seen.pairs()
        self._seen, self._weights = seen, weights
        self._ends = np.cumsum(weights)
        self._total = int(self._ends[-1]) if len(weights) else 0
        own = weights[items]
        through = np.append(0, np.cumsum(own))
        self._starts, self._through = np.asarray(seen.starts), through
        before = self._ends[items] - own - (through[:-1] - through[self._starts[users]])
        self._shifted = users * self._total + before

    def with_one(self, items: npt.NDArray[np.integer]) -> PopularUnseen:
        """Return as many users as there are ``items``, each of whom had one of these; -1: none."""
        return PopularUnseen(self._seen.with_one(items), self._weights)

    def unseen_weight(self, users: npt.NDArray[np.integer]) -> Int64s:
        return self._total - (self._through[self._starts[users + 1]] - self._through[self._starts[users]])

    def draw(self, users: npt.NDArray[np.integer], words: UInt64s) -> Int64s:
        """Return one item per user, chosen by ``words``.

        A user who had every item of any weight gets any item by weight.
        """
        users = users.astype(np.int64)
        unseen = self.unseen_weight(users)
        had_all = unseen <= 0
        chosen = below(words, np.where(had_all, self._total, unseen))
        place = np.searchsorted(self._shifted, users * self._total + chosen, side="right")
        own = self._through[place] - self._through[self._starts[users]]
        return np.searchsorted(self._ends, chosen + np.where(had_all, 0, own), side="right")


def popularity_weights(counts: npt.NDArray[np.integer], power: float) -> Int64s:
    """Return counts^power as integers whose sum is below 2^32.

    A weight is at least 1 where an item occurs, and 0 where it does not. Rounding moves the probability of an item by
    less than num_items / 2^32.
    """
    wanted = np.where(counts > 0, counts.astype(np.float64) ** power, 0.0)
    scaled = np.rint(wanted * (2.0**31 / max(wanted.sum(), 1.0)))
    return np.where(counts > 0, np.maximum(scaled, 1.0), 0.0).astype(np.int64)
