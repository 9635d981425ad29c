"""Uniform items that a user never had, without rejection. Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.hashing import Int64s, UInt64s, below
from trainer.data.jagged import sorted_unique


class SeenItems:
    """Which items each user had, as one sorted array of ``user * num_items + item``; may be memory-mapped.

    With a user's items sorted as s_0 < s_1 < ..., the k-th item (from 0) that is not among them is
    k + |{i: s_i - i <= k}|. ``shifted`` holds user * num_items + (s_i - i), which is sorted
    too, so one binary search per draw answers it.
    """

    def __init__(self, shifted: Int64s, starts: Int64s, num_items: int):
        self.shifted = shifted
        self.starts = starts
        self.num_items = num_items

    @staticmethod
    def from_pairs(
        users: npt.NDArray[np.integer], items: npt.NDArray[np.integer], num_users: int, num_items: int
    ) -> SeenItems:
        """From (user, item) pairs in any order, repeats allowed; users in [0, num_users), items in [0, num_items)."""
        pairs = sorted_unique(users.astype(np.int64) * num_items + items.astype(np.int64))
        starts = np.searchsorted(pairs, np.arange(num_users + 1) * num_items)
        rank = np.arange(len(pairs)) - np.repeat(starts[:-1], np.diff(starts))
        return SeenItems(pairs - rank, starts, num_items)

    def num_unseen(self, users: npt.NDArray[np.integer]) -> Int64s:
        return self.num_items - (self.starts[users + 1] - self.starts[users])

    def draw(self, users: npt.NDArray[np.integer], words: UInt64s) -> Int64s:
        """One item per user, uniform over those the user never had, chosen by ``words``.

        A user who had every item gets any item: callers that cannot accept that check :meth:`num_unseen`.
        """
        users = users.astype(np.int64)
        unseen = self.num_unseen(users)
        had_all = unseen <= 0
        chosen = below(words, np.where(had_all, self.num_items, unseen))
        before = np.searchsorted(self.shifted, users * self.num_items + chosen, side="right") - self.starts[users]
        return np.where(had_all, chosen, chosen + before)
