"""Draws of items that a user never had, uniform or by popularity, without rejection. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.hashing import Int64s, UInt64s, below
from trainer.data.columns.jagged import sorted_unique


class SeenItems:
    """Set of items that each user had, as one sorted array of ``user * num_items + item``; may be memory-mapped.

    With a user's items sorted as s_0 < s_1 < ..., the k-th item (from 0) that is not among them is
    k + |{i: s_i - i <= k}|. ``shifted`` holds user * num_items + (s_i - i), which is sorted too, so a draw takes one
    binary search.
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
        return SeenItems.from_sorted(pairs, num_users, num_items)

    @staticmethod
    def from_sorted(pairs: Int64s, num_users: int, num_items: int) -> SeenItems:
        """Build from distinct ``user * num_items + item``, ascending."""
        starts = np.searchsorted(pairs, np.arange(num_users + 1) * num_items)
        rank = np.arange(len(pairs)) - np.repeat(starts[:-1], np.diff(starts))
        return SeenItems(pairs - rank, starts, num_items)

    def unseen_weight(self, users: npt.NDArray[np.integer]) -> Int64s:
        """Return the number of items that each user never had."""
        return self.num_items - (self.starts[users + 1] - self.starts[users])

    def unseen_at(self, users: npt.NDArray[np.integer], chosen: Int64s) -> Int64s:
        """Return, for each user, item number ``chosen``, below :meth:`unseen_weight`, of its unseen items."""
        before = np.searchsorted(self.shifted, users * self.num_items + chosen, side="right") - self.starts[users]
        return chosen + before

    def draw(self, users: npt.NDArray[np.integer], words: UInt64s) -> Int64s:
        """Return one item per user, uniform over the items that the user never had, chosen by ``words``.

        A user who had every item gets any item: callers that cannot accept that check :meth:`unseen_weight`.
        """
        users = users.astype(np.int64)
        unseen = self.unseen_weight(users)
        had_all = unseen <= 0
        chosen = below(words, np.where(had_all, self.num_items, unseen))
        return np.where(had_all, chosen, self.unseen_at(users, chosen))

    def pairs(self) -> tuple[Int64s, Int64s]:
        """Return all (user, item) pairs, ascending, as two arrays."""
        lengths = np.diff(self.starts)
        users = np.repeat(np.arange(len(lengths)), lengths)
        rank = np.arange(len(self.shifted)) - np.repeat(self.starts[:-1], lengths)
        return users, np.asarray(self.shifted) - users * self.num_items + rank


class KnownPairs:
    """Lookup of (user, item) pairs that occurred, by their table rows.

    ``rows``: table row of each item in ``seen``.
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
    """The draws of :class:`SeenItems`, but with probabilities proportional to integer weights of the items.

    With C_j the sum of the weights before item j, and a user's items s_0 < s_1 < ..., the unseen items before s_i weigh
    C_{s_i} - sum of the weights of s_0 .. s_{i-1}. This ascends with i. So for a number drawn below the weight of all
    unseen items, one binary search finds the user's own items before it, and a second one the unseen item. With
    weights of 1 this is :class:`SeenItems`.
    """

    def __init__(self, seen: SeenItems, weights: Int64s):
        users, items = seen.pairs()
        self._ends = np.cumsum(weights)
        self._total = int(self._ends[-1]) if len(weights) else 0
        own = weights[items]
        through = np.append(0, np.cumsum(own))
        self._starts, self._through = np.asarray(seen.starts), through
        before = self._ends[items] - own - (through[:-1] - through[self._starts[users]])
        self._shifted = users * self._total + before

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
        return np.where(had_all, np.searchsorted(self._ends, chosen, side="right"), self.unseen_at(users, chosen))

    def unseen_at(self, users: npt.NDArray[np.integer], chosen: Int64s) -> Int64s:
        """Return for each user the unseen item that holds ``chosen``, a number below :meth:`unseen_weight`."""
        place = np.searchsorted(self._shifted, users * self._total + chosen, side="right")
        own = self._through[place] - self._through[self._starts[users]]
        return np.searchsorted(self._ends, chosen + own, side="right")


class UnseenUntil:
    """Draws that exclude only items that a user had up to a time; items that the user has later can be drawn.

    Let w be the weight of the items that the user never has, and c_1, c_2, ... those of its later items in the order of
    their first time. A number is drawn below w + c_1 + c_2 + ...; from w on it stands for a later item.

    Args:
        pairs: ``user * num_items + item``, in any order, repeats allowed [n].
        times: times of the pairs [n]; None: the users count as having had all items from the beginning.
        num_users: users are in [0, num_users).
        num_items: items are in [0, num_items).
        weights: weight of each item, at least 1; None: 1.
    """

    def __init__(
        self,
        pairs: Int64s,
        times: npt.NDArray[Any] | None,
        num_users: int,
        num_items: int,
        weights: Int64s | None = None,
    ):
        self._times = None
        if times is None:
            self.pairs = sorted_unique(pairs)
            """Distinct pairs, ascending."""
        else:
            by_time = np.argsort(times, kind="stable")
            self._times = times[by_time]
            self.pairs, first = np.unique(pairs[by_time], return_index=True)
            # A key for each pair: the pair's user, and the position in time of the pair's first row.
            self._keys = np.sort(self.pairs // num_items * len(times) + first)
            self._items = pairs[by_time][self._keys % len(times)] % num_items if len(times) else pairs
            ones = np.ones(num_items, np.int64)
            self._through = np.append(0, np.cumsum((ones if weights is None else weights)[self._items]))
        seen = SeenItems.from_sorted(self.pairs, num_users, num_items)
        self._ends = np.asarray(seen.starts)[1:]
        self._never: SeenItems | PopularUnseen = seen if weights is None else PopularUnseen(seen, weights)

    def has_none(self, users: npt.NDArray[np.integer], times: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_]:
        """Return True for each user and time that has no item left to draw."""
        none = self._never.unseen_weight(users.astype(np.int64)) <= 0
        # Few users had every item: only their times need to be looked up.
        rows = np.flatnonzero(none)
        none[rows] = self._weights(users[rows].astype(np.int64), None if times is None else times[rows])[0] <= 0
        return none

    def _weights(self, users: Int64s, times: npt.NDArray[Any] | None) -> tuple[Int64s, Int64s, Int64s]:
        """Return the weights of all items to draw and of items never seen, and the index of the first later item."""
        never = self._never.unseen_weight(users)
        if self._times is None:
            return never, never, never
        assert times is not None
        places = np.searchsorted(self._times, times, side="right")
        later = np.searchsorted(self._keys, users * len(self._times) + places)
        return never + self._through[self._ends[users]] - self._through[later], never, later

    def draw(self, users: npt.NDArray[np.integer], times: npt.NDArray[Any] | None, words: UInt64s) -> Int64s:
        """Return one item for each user and time, chosen by ``words``; there has to be one (:meth:`has_none`)."""
        weight, never, later = self._weights(users.astype(np.int64), times)
        chosen = below(words, weight)
        drawn = self._never.unseen_at(users.astype(np.int64), np.minimum(chosen, np.maximum(never - 1, 0)))
        if self._times is not None:
            is_later = np.flatnonzero(chosen >= never)
            beyond = self._through[later[is_later]] + chosen[is_later] - never[is_later]
            drawn[is_later] = self._items[np.searchsorted(self._through, beyond, side="right") - 1]
        return drawn


def popularity_weights(counts: npt.NDArray[np.integer], power: float) -> Int64s:
    """Return counts^power as integers whose sum is below 2^32.

    A weight is at least 1 where an item occurs, and 0 where it does not. Rounding moves the probability of an item by
    less than num_items / 2^32.
    """
    wanted = np.where(counts > 0, counts.astype(np.float64) ** power, 0.0)
    scaled = np.rint(wanted * (2.0**31 / max(wanted.sum(), 1.0)))
    return np.where(counts > 0, np.maximum(scaled, 1.0), 0.0).astype(np.int64)
