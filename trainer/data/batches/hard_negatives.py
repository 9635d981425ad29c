"""Hard negatives: a share of the drawn negatives are neighbours of a positive in vectors published before. Torch-free.

Of bpr the positive is the example's own. In the softmax over a batch an item is an alternative to every query, so that
of two_tower is a positive of the same global batch, drawn for each example of label 0, whose item gives way. What the
positive's user had in training is no negative: HARD_DRAWS neighbours are drawn, and the first that the user never had
counts; where there is none, or the version did not have the positive, the negative stays what it was.

Each is a function of (seed, epoch, sample): any number of ranks, and a run after a resume, draw the same ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.batches.number_columns import Float32s, item_vectors
from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.columns.hashing import Int64s, below, derive_key, random_words, unit_interval
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.vectors import arranged
from trainer.data.errors import DataError
from trainer.data.prepare.examples import take
from trainer.data.prepare.negatives import KnownPairs

NEIGHBORS_FILE = "neighbors.npy"
"""Beside prepared data: int32 [rows of items, nearest], rows of the neighbours of each, best first, then -1."""
HARD_DRAWS = 8
CHUNK_ROWS = 1 << 16
_HARD, _POSITIVE = 23, 24


def open_neighbors(data: PreparedColumns) -> npt.NDArray[np.int32]:
    """Return NEIGHBORS_FILE, memory-mapped.

    Raises:
        DataError: it is not there.
    """
    try:
        neighbors: npt.NDArray[np.int32] = np.load(data.directory / NEIGHBORS_FILE, mmap_mode="r")
    except FileNotFoundError:
        raise DataError(
            f"model.hard_negatives needs {NEIGHBORS_FILE}, and there is none",
            where=str(data.directory),
            remedy="a run writes it from the last published version; leave the setting out elsewhere",
        ) from None
    return neighbors


class HardNegatives:
    """Draws neighbours of positives in the place of a share of other negatives."""

    def __init__(self, data: PreparedColumns, epoch: int):
        assert data.hard_negatives is not None
        self._share = float(data.hard_negatives["share"])
        self._neighbors = open_neighbors(data)
        seen, items = data.seen_items
        self._known = KnownPairs(seen, items if data.catalogue is None else data.catalogue.rows)
        self._key = derive_key(data.seed, epoch, _HARD)

    def instead_of(self, drawn: Int64s, users: npt.NDArray[np.integer], positives: Int64s, samples: Int64s) -> Int64s:
        """Return item rows [n]: those of ``drawn``, or hard ones, for positives that ``users`` had."""
        near = np.asarray(self._neighbors[positives])
        counts, number_of = (near >= 0).sum(1), np.arange(len(samples))
        negatives, first = drawn.copy(), samples * (HARD_DRAWS + 1)
        missing = (unit_interval(random_words(self._key, first)) < self._share) & (counts > 0)
        for number in range(1, HARD_DRAWS + 1):
            other = near[number_of, below(random_words(self._key, first + number), counts)].astype(np.int64)
            chosen = missing & ~self._known.had(users, other)
            negatives[chosen] = other[chosen]
            missing &= ~chosen
        return negatives


class OtherItems(NamedTuple):
    """Items that some samples of a batch have in the place of their own."""

    samples: Int64s
    """Places in the batch, ascending."""
    features: dict[str, npt.NDArray[np.integer] | Jagged]
    """By key, what the items have."""
    numbers: Float32s | None
    """Numbers as a batch has them [samples, n], of which only those of items count; None without any."""


class HardItems:
    """Items in the place of those of examples of label 0, for a softmax over the batch."""

    def __init__(self, data: PreparedColumns, epoch: int):
        self._data, self._epoch, self._hard = data, epoch, HardNegatives(data, epoch)
        columns = {key.name: data.checked_column("train", key) for key in data.keys if key.name in ("user", "item")}
        self._users, self._items = columns["user"], columns["item"]
        self._is_positive = data.labels("train") > 0
        self._order, self._key = data.order(), derive_key(data.seed, epoch, _POSITIVE)
        self._catalogue = data.catalogue
        if self._catalogue is not None:
            self._place_of_row = self._catalogue.place_of_row(len(open_neighbors(data)))
        num_items = data.num_item_numbers
        of_items = {one.name: np.full((1, one.dim), one.of_item, dtype=np.float32) for one in data.vectors}
        mask = arranged(
            np.zeros((1, data.num_dense - num_items), dtype=np.float32),
            np.ones((1, num_items), dtype=np.float32),
            data.vectors,
            of_items,
        )
        self.number_mask = mask[0] > 0
        """Which numbers of a batch are of items."""

    def of(self, rows: Int64s, sample_offset: int, global_size: int, first_sample: int) -> OtherItems:
        """Return the items of a rank's rows that give way; arguments as those of ``BatchReader.batch``."""
        start = first_sample - sample_offset
        everyone = self._order.rows(self._epoch, start, start + global_size)
        positives, samples = everyone[self._is_positive[everyone]], np.flatnonzero(~self._is_positive[rows])
        if not len(positives):
            samples = samples[:0]
        drawn = np.asarray(self._items[rows[samples]]).astype(np.int64)
        numbers = first_sample + samples
        chosen = positives[below(random_words(self._key, numbers), max(len(positives), 1))] if len(samples) else samples
        items = self._hard.instead_of(
            drawn, np.asarray(self._users[chosen]), np.asarray(self._items[chosen]).astype(np.int64), numbers
        )
        differs = items != drawn
        return self._as_items(samples[differs], items[differs])

    def _as_items(self, samples: Int64s, items: Int64s) -> OtherItems:
        if self._catalogue is None:
            return OtherItems(samples, {"item": items}, None)
        places = self._place_of_row[items]
        features = {name: take(column, places) for name, column in self._catalogue.features.items()}
        numbers = None
        if self.number_mask.any():
            data, none = self._data, np.zeros((len(places), 0), dtype=np.float32)
            of_rows = np.zeros((len(places), data.num_dense - data.num_item_numbers), dtype=np.float32)
            blocks = {one.name: np.zeros((len(places), one.dim), np.float32) for one in data.vectors if not one.of_item}
            blocks |= item_vectors(self._catalogue, places)
            of_items = self._catalogue.numbers[places] if data.num_item_numbers else none
            numbers = arranged(of_rows, of_items, data.vectors, blocks)
        return OtherItems(samples, {**features, "item": items}, numbers)


def expected_shares(data: PreparedColumns) -> npt.NDArray[np.float64]:
    """Return for each row of the table of items the expected share of training samples that have it, float64 [rows].

    With hard negatives an example of label 0 is, with probability ``share``, a neighbour of a positive. What users had
    already is not left out of it, as that would take a look at each neighbour of each example.
    """
    key = next(key for key in data.keys if key.name == "item")
    items, size = np.asarray(data.column("train", key)), data.tables[key.table].num_rows
    counts = np.bincount(items, minlength=size).astype(np.float64)
    if data.hard_negatives is not None:
        neighbors = open_neighbors(data)
        is_positive = np.asarray(data.labels("train") > 0)
        positives = np.bincount(items[is_positive], minlength=size)
        negatives = counts - positives
        share_of_each, hard = positives / max(positives.sum(), 1), np.zeros(size)
        for start in range(0, size, CHUNK_ROWS):
            near, shares = neighbors[start : start + CHUNK_ROWS], share_of_each[start : start + CHUNK_ROWS]
            there = near >= 0
            weights = np.broadcast_to((shares / np.maximum(there.sum(1), 1))[:, None], near.shape)
            hard += np.bincount(near[there], weights=weights[there], minlength=size)
        share = data.hard_negatives["share"]
        counts = positives + negatives * (1.0 - share * hard.sum()) + share * negatives.sum() * hard
    return counts / max(counts.sum(), 1.0)
