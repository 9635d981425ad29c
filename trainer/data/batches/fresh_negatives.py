"""Negatives that are drawn anew in each epoch, each a function of (seed, epoch, sample). Torch-free.

The negatives therefore depend neither on the number of ranks nor on a resume.

``uniform`` draws from the training items uniformly, ``popularity`` by their number of training examples to a power.
Both ways exclude items that the user has in training. ``in_batch`` draws the items of IN_BATCH_DRAWS other examples of
the global batch and takes the first that the user does not have in training, or else a uniform draw.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.columns.hashing import Int64s, below, derive_key, random_words
from trainer.data.prepare.negatives import KnownPairs, PopularUnseen, SeenItems, popularity_weights

IN_BATCH_DRAWS = 8
_NEGATIVES, _IN_BATCH = 21, 22


class FreshNegatives:
    """Sampler of BPR's negatives: for each example, an item that its user does not have in the training split."""

    def __init__(self, data: PreparedColumns, epoch: int):
        self._seen, self._items = data.seen_items
        self._unseen: SeenItems | PopularUnseen = self._seen
        if data.sampling == "popularity":
            weights = popularity_weights(data.example_counts("item")[self._items], data.sampling_power)
            self._unseen = PopularUnseen(self._seen, weights)
        self._key = derive_key(data.seed, epoch, _NEGATIVES)
        self._in_batch = None
        if data.sampling == "in_batch":
            self._in_batch = _InBatch(data, epoch, self._seen, self._items)

    def draw(self, users: npt.NDArray[np.int32], first_sample: int) -> Int64s:
        """Return negatives, item rows int64 [b], for consecutive examples of the epoch's global order.

        ``users``: table row of each example's user, [b]; ``first_sample``: number of the first example in the global
        order.
        """
        samples = np.arange(first_sample, first_sample + len(users))
        negatives = self._items[self._unseen.draw(users, random_words(self._key, samples))]
        return negatives if self._in_batch is None else self._in_batch.instead_of(negatives, users, samples)


class _InBatch:
    """Sampler of negatives from the items of the other examples in the same global batch."""

    def __init__(self, data: PreparedColumns, epoch: int, seen: SeenItems, items: Int64s):
        item = next(key for key in data.keys if key.name == "item")
        column = data.column("train", item)
        assert isinstance(column, np.ndarray)
        self._column, self._order = column, data.order()
        self._epoch, self._size, self._num = epoch, data.batch_size, data.num_examples["train"]
        self._key = derive_key(data.seed, epoch, _IN_BATCH)
        self._known = KnownPairs(seen, items)

    def instead_of(self, uniform: Int64s, users: npt.NDArray[np.int32], samples: Int64s) -> Int64s:
        if not len(samples):
            return uniform
        start = int(samples[0]) // self._size * self._size
        stop = min(start + self._size, self._num)
        if stop - start < 2:
            return uniform
        items = self._column[self._order.rows(self._epoch, start, stop)].astype(np.int64)
        negatives = uniform.copy()
        missing = np.ones(len(samples), dtype=bool)
        for number in range(IN_BATCH_DRAWS):
            words = random_words(self._key, samples * IN_BATCH_DRAWS + number)
            # The random offset counts from the example itself, so it never draws its own item.
            other = items[(samples - start + 1 + below(words, stop - start - 1)) % (stop - start)]
            chosen = missing & (other > 1) & ~self._known.had(users, other)
            negatives[chosen] = other[chosen]
            missing &= ~chosen
        return negatives
