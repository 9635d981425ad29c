"""Recent negatives: items of the training rows just before an example's own time. Torch-free.

A row is drawn among the ``model.negative_window`` training rows that are the last ones before the example's time, so an
item is as likely as it was popular then, and one that nobody clicked for so long is none. With negatives drawn by q the
loss of bpr is least where score(i) - score(j) = log(P(i | user) q(j)) - log(P(j | user) q(i)), so that the score tends
to log P(i | user) - log q(i) + const (compare Levy and Goldberg, Neural Word Embedding as Implicit Matrix
Factorization, NIPS 2014): how popular an item is at the moment is left to who ranks, and knows it.

What the user had in training is no negative: RECENT_DRAWS rows are drawn, and the first whose item the user never had
counts; where there is none, or no row is earlier, the negative stays what it was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.columns.hashing import Int64s, below, derive_key, random_words
from trainer.data.prepare.arrays import OFFSET, map_array
from trainer.data.prepare.negatives import KnownPairs

TIME_ORDER_FILE = "recent.order.bin"
"""Beside prepared data: int64 [training rows], their numbers by time."""
EARLIER_FILE = "recent.earlier.bin"
"""Beside prepared data: int64 [training rows], how many of them are before the time of each."""
RECENT_DRAWS = 8
_RECENT = 25


class RecentNegatives:
    """Draws items that were popular just before each example; functions of (seed, epoch, sample)."""

    def __init__(self, data: PreparedColumns, epoch: int):
        item = next(key for key in data.keys if key.name == "item")
        column = data.column("train", item)
        assert isinstance(column, np.ndarray)
        assert data.sampling_window is not None
        self._items, self._window = column, data.sampling_window
        self._by_time, self._earlier = (
            map_array(data.directory / name, OFFSET) for name in (TIME_ORDER_FILE, EARLIER_FILE)
        )
        self._order, self._epoch = data.order(), epoch
        self._key = derive_key(data.seed, epoch, _RECENT)
        self._known = KnownPairs(*data.seen_items)

    def instead_of(self, drawn: Int64s, users: npt.NDArray[np.int32], samples: Int64s) -> Int64s:
        """Return item rows [n] for consecutive ``samples`` of the epoch: recent ones, else those of ``drawn``."""
        if not len(samples):
            return drawn
        rows = self._order.rows(self._epoch, int(samples[0]), int(samples[-1]) + 1)
        stop = np.asarray(self._earlier[rows])
        size = np.minimum(stop, self._window)
        negatives, missing = drawn.copy(), size > 0
        for number in range(RECENT_DRAWS):
            words = random_words(self._key, samples * RECENT_DRAWS + number)
            place = np.maximum(stop - 1 - below(words, np.maximum(size, 1)), 0)
            other = self._items[self._by_time[place]].astype(np.int64)
            chosen = missing & (other > 1) & ~self._known.had(users, other)
            negatives[chosen] = other[chosen]
            missing &= ~chosen
        return negatives
