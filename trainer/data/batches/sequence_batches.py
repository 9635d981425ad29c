"""Batches of sequence models: keys ``item`` (the items that are read), ``item__target`` and ``item__negative``.

All keys hold rows of the item table as lists.

Negatives are drawn by Philox4x32-10: key (seed, crc32("item__negative")), counter (epoch, sample, slot >> 1, 0). Word
2 (slot & 1) of its output and the next word form a 64-bit number. ``sample`` counts the examples of the epoch in their
global order and ``slot`` the draws of one example, so the draws do not depend on ranks, micro-batches and resumes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torchrec import KeyedJaggedTensor

from embeddings.tables.philox import philox4x32, table_key
from trainer.data.batches.bags import features_of
from trainer.data.batches.batch import Batch
from trainer.data.batches.fresh_negatives import IN_BATCH_DRAWS
from trainer.data.batches.order import rank_slice
from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.hashing import Int64s, UInt64s, below, mix, unit_interval
from trainer.data.columns.jagged import Jagged, gather_spans
from trainer.data.prefetch import Prefetched
from trainer.data.prepare.negatives import PopularUnseen, SeenItems, popularity_weights
from trainer.data.prepare.sequences import ITEM, NEGATIVE, SEQUENCE_KEYS, TARGET
from trainer.data.prepare.split import SPLIT_SEED

NUM_EVALUATION_NEGATIVES = 100
# Largest evaluation batch: each example looks up 100 rows.
MAX_BATCH = 1024


def words(key: tuple[int, int], epoch: int, samples: Int64s, num_slots: int) -> UInt64s:
    """Return the random 64-bit words, uint64 [b, num_slots], of samples [b], as the module's docstring defines them."""
    slots = np.arange((num_slots + 1) // 2, dtype=np.uint64)[None, :]
    random = philox4x32((epoch, samples.astype(np.uint64)[:, None], slots, 0), key)
    pairs = np.stack([random[0] << np.uint64(32) | random[1], random[2] << np.uint64(32) | random[3]], axis=2)
    return pairs.reshape(len(samples), 2 * slots.shape[1])[:, :num_slots]


class SkipGrams:
    """Examples of item2vec: an item of a training sequence; its targets are items at most ``window`` positions away.

    Each target has ``negatives`` draws, by default with probabilities proportional to counts^0.75 in the training
    split. A draw that is the target itself does not count, as in word2vec: the padding row 0 replaces it.
    """

    def __init__(self, data: PreparedColumns, epoch: int):
        assert data.sequence is not None
        self._train = data.sequences.train
        self._window, self._negatives = data.sequence["window"], data.sequence["negatives"]
        self._epoch, self._key = epoch, table_key(data.seed, NEGATIVE)
        counts = data.row_counts(data.keys[0].table)
        power = data.sampling_power if data.sampling == "popularity" else 0.0
        weights = np.where(counts > 0, counts.astype(np.float64) ** power, 0.0)
        weights[:NUM_SPECIAL_ROWS] = 0.0
        self._cumulative = np.cumsum(weights) / weights.sum()

    def lists(self, rows: Int64s, samples: Int64s, whole: Int64s | None = None) -> dict[str, Jagged]:
        items, starts = self._train
        sequence = np.searchsorted(starts, rows, side="right") - 1
        offsets = np.concatenate([np.arange(-self._window, 0), np.arange(1, self._window + 1)])
        positions = rows[:, None] + offsets
        inside = (positions >= starts[sequence][:, None]) & (positions < starts[sequence + 1][:, None])
        targets = items[np.where(inside, positions, 0)].astype(np.int64)
        random = words(self._key, self._epoch, samples, len(offsets) * self._negatives)
        if whole is not None:
            negatives = items[whole][below(random, len(whole))].astype(np.int64)
        else:
            negatives = np.searchsorted(self._cumulative, unit_interval(random), side="right")
        # Rounding may leave the last cumulative probability slightly below 1.
        negatives = np.minimum(negatives, len(self._cumulative) - 1).reshape(*targets.shape, self._negatives)
        negatives[negatives == targets[:, :, None]] = 0
        count = inside.sum(axis=1)
        return {
            ITEM: _singles(items[rows]),
            TARGET: _lists(targets[inside], count),
            NEGATIVE: _lists(negatives[inside].reshape(-1), count * self._negatives),
        }


class NextItems:
    """Examples of SASRec, GRU4Rec and HSTU: pieces of training sequences.

    See :class:`trainer.data.prepare.sequences.Windows`. ``item`` holds all items of the piece but the last,
    ``item__target`` all but the first. ``item__negative`` holds, for each target, ``negatives`` training items, by
    default uniform, that the user does not have in the training split. If all targets share their negatives, the first
    sample of the rank's part holds all of them (:class:`SharedItems`).
    """

    def __init__(self, data: PreparedColumns, epoch: int):
        assert data.sequence is not None
        self._train, self._windows = data.sequences.train, data.windows
        self._length, self._negatives = data.sequence["length"], data.sequence["negatives"]
        self._epoch, self._key = epoch, table_key(data.seed, NEGATIVE)
        compared_with, self._shared = data.sequence.get("compared_with", "own"), None
        if compared_with == "own":
            self._unseen = Unseen(data, data.sampling_power if data.sampling == "popularity" else None)
        else:
            self._shared = SharedItems(data, epoch, 0 if compared_with == "all" else self._negatives)

    def lists(self, rows: Int64s, samples: Int64s, whole: Int64s | None = None) -> dict[str, Jagged]:
        items, starts = self._train
        sequence, begin, end = self._windows.spans(rows)
        count = end - begin - 1
        read = {ITEM: gather_spans(items, begin, count), TARGET: gather_spans(items, begin + 1, count)}
        if self._shared is not None:
            targets = None if whole is None else self._targets(whole)
            negatives = self._shared.rows(int(samples[0]), targets) if len(samples) else np.empty(0, dtype=np.int64)
            lengths = np.zeros(len(rows), dtype=np.int64)
            lengths[:1] = len(negatives)
            return {**read, NEGATIVE: _lists(negatives, lengths)}
        random = words(self._key, self._epoch, samples, self._length * self._negatives)
        had = gather_spans(items, starts[sequence], starts[sequence + 1] - starts[sequence])
        # Slots are counted from the end, so the last target's draws do not depend on the length of the piece.
        inside = np.arange(self._length)[None, :] >= self._length - count[:, None]
        random = random.reshape(len(rows), self._length, self._negatives)[inside].reshape(-1)
        owners = np.repeat(np.arange(len(rows)), count * self._negatives)
        return {**read, NEGATIVE: _lists(self._draw(had, owners, random, whole), count * self._negatives)}

    def _targets(self, rows: Int64s) -> Int64s:
        _, begin, end = self._windows.spans(rows)
        return gather_spans(self._train.values, begin + 1, end - begin - 1).values.astype(np.int64)

    def _draw(self, had: Jagged, owners: Int64s, random: UInt64s, whole: Int64s | None) -> Int64s:
        """Return a negative for each word of ``random`` [n], from ``whole`` if given, but not of list ``owners[i]``."""
        negatives = self._unseen.draw(had, owners, random)
        if whole is None:
            return negatives
        others = self._targets(whole)
        width = int(max(others.max(initial=0), had.values.max(initial=0))) + 1
        own = np.sort(np.repeat(np.arange(len(had.lengths)), had.lengths) * width + had.values)
        missing = np.ones(len(negatives), dtype=bool)
        for number in range(IN_BATCH_DRAWS):
            other = others[below(mix(random + np.uint64(number)), len(others))]
            pairs = owners * width + other
            index = np.minimum(np.searchsorted(own, pairs), len(own) - 1)
            chosen = missing & (own[index] != pairs)
            negatives[chosen] = other[chosen]
            missing &= ~chosen
        return negatives


class SharedItems:
    """Items with which all targets of a global batch are compared: ``num_drawn`` drawn items, or all if it is 0.

    Draws may repeat an item. The draws use the random words of the global batch's first sample, so that all ranks and
    micro-batches have the same items.
    """

    def __init__(self, data: PreparedColumns, epoch: int, num_drawn: int):
        counts = data.row_counts(data.keys[0].table)
        self._items = np.flatnonzero(counts[NUM_SPECIAL_ROWS:] > 0) + NUM_SPECIAL_ROWS
        self._epoch, self._num_drawn, self._size = epoch, num_drawn, data.batch_size
        self._key = table_key(data.seed, NEGATIVE)
        self._ends = None
        if data.sampling == "popularity":
            self._ends = np.cumsum(popularity_weights(counts[self._items], data.sampling_power))

    def rows(self, sample: int, targets: Int64s | None = None) -> Int64s:
        """Return the shared items of the global batch that contains ``sample``, as table rows int64 [n].

        ``targets`` are the batch's targets, from which the items are drawn; None: they are drawn from all training
        items.
        """
        if not self._num_drawn:
            return self._items
        random = words(self._key, self._epoch, np.array([sample // self._size * self._size]), self._num_drawn)[0]
        if targets is not None:
            return targets[below(random, len(targets))]
        if self._ends is None:
            return self._items[below(random, len(self._items))]
        return self._items[np.searchsorted(self._ends, below(random, int(self._ends[-1])), side="right")]


class Unseen:
    """Sampler of training items that are not in a list: uniformly, or by popularity to the power ``power``."""

    def __init__(self, data: PreparedColumns, power: float | None = None):
        counts = data.row_counts(data.keys[0].table)
        self._items = np.flatnonzero(counts[NUM_SPECIAL_ROWS:] > 0) + NUM_SPECIAL_ROWS
        self._place = np.full(len(counts), -1, dtype=np.int64)
        self._place[self._items] = np.arange(len(self._items))
        self._weights = None if power is None else popularity_weights(counts[self._items], power)

    def draw(self, had: Jagged, owners: Int64s, random: UInt64s) -> Int64s:
        """Return an item for each word i that is not in list ``owners[i]`` of ``had``; any item if all are in it."""
        places = self._place[had.values]
        lists = np.repeat(np.arange(len(had.lengths)), had.lengths)
        known = places >= 0
        seen = SeenItems.from_pairs(lists[known], places[known], len(had.lengths), len(self._items))
        unseen = seen if self._weights is None else PopularUnseen(seen, self._weights)
        return self._items[unseen.draw(owners, random)]


class RankingReader:
    """Reader of held-out examples, in which the item that came next is ranked among 100 other items.

    ``item`` holds the user's items before it, ``item__target`` the item that came next, and ``item__negative`` 100
    uniformly drawn items that the user has in no split. The negatives depend only on the split and the example's
    number, so they are the same for every job on the same data.
    """

    def __init__(self, data: PreparedColumns, split: str, *, num_negatives: int = NUM_EVALUATION_NEGATIVES):
        assert data.sequence is not None
        self._sequences, self._split, self._num_negatives = data.sequences, split, num_negatives
        self._places = data.sequences.held[split]
        self._length = data.sequence["history"]
        self._key = table_key(SPLIT_SEED, split)
        self._unseen = Unseen(data)

    def batch(self, examples: Int64s, sample_offset: int, global_size: int, step: int) -> Batch:
        before, everything = self._histories(examples)
        negatives = np.empty((len(examples), 0), dtype=np.int64)
        if self._num_negatives:
            random = words(self._key, 0, examples, self._num_negatives).reshape(-1)
            owners = np.repeat(np.arange(len(examples)), self._num_negatives)
            negatives = self._unseen.draw(everything, owners, random).reshape(-1, self._num_negatives)
        return self._against(examples, before, negatives, sample_offset, global_size, step)

    def against(self, examples: Int64s, negatives: Int64s, sample_offset: int, global_size: int, step: int) -> Batch:
        """Return the batch of the examples with these numbers [b], with the given negatives, item rows [b, k]."""
        return self._against(examples, self._histories(examples)[0], negatives, sample_offset, global_size, step)

    def _histories(self, examples: Int64s) -> tuple[Jagged, Jagged]:
        return self._sequences.history(self._split, np.asarray(self._places[examples]))

    def _against(
        self, examples: Int64s, before: Jagged, negatives: Int64s, sample_offset: int, global_size: int, step: int
    ) -> Batch:
        lists = {
            ITEM: before.last(self._length),
            TARGET: _singles(self._sequences.items[self._places[examples]]),
            NEGATIVE: _lists(negatives.reshape(-1), np.full(len(examples), negatives.shape[1])),
        }
        samples = np.repeat(np.arange(len(examples)), before.lengths)
        seen = torch.from_numpy(np.stack([samples, before.values.astype(np.int64)], axis=1))
        return _batch(lists, sample_offset, global_size, step, seen)


class SequenceReader:
    """Reader of a sequence model's training batches, as :func:`trainer.data.batches.batches.train_batches` calls it."""

    def __init__(self, data: PreparedColumns, epoch: int):
        assert data.sequence is not None
        self._make: SkipGrams | NextItems = (SkipGrams if data.sequence["kind"] == "item2vec" else NextItems)(
            data, epoch
        )
        self._order = data.order() if data.sampling == "in_batch" else None
        self._epoch, self._size, self._num = epoch, data.batch_size, data.num_examples["train"]

    def batch(self, rows: Int64s, sample_offset: int, global_size: int, step: int, first_sample: int) -> Batch:
        whole = None
        if self._order is not None:
            start = first_sample // self._size * self._size
            whole = self._order.rows(self._epoch, start, min(start + self._size, self._num))
        lists = self._make.lists(rows, np.arange(first_sample, first_sample + len(rows)), whole)
        return _batch(lists, sample_offset, global_size, step)


def ranking_batches(
    data: PreparedColumns, split: str, batch_size: int, rank: int, world_size: int, *,
    sample: int | None = None, num_negatives: int = NUM_EVALUATION_NEGATIVES,
) -> Prefetched[Batch]:  # fmt: skip
    """Return the batches of a held-out split in the order of users. See :class:`RankingReader`.

    ``sample`` is the number of examples to take, evenly spaced; None: all examples.
    """
    num_held = data.num_examples[split]
    num_examples = num_held if sample is None else min(sample, num_held)
    batch_size = min(batch_size, MAX_BATCH)
    reader = RankingReader(data, split, num_negatives=num_negatives)

    def make(step: int) -> Batch:
        start = step * batch_size
        global_size = min(batch_size, num_examples - start)
        first, last = rank_slice(global_size, rank, world_size)
        examples = np.arange(start + first, start + last) * num_held // max(1, num_examples)
        return reader.batch(examples, first, global_size, step)

    return Prefetched(make, 0, -(-num_examples // batch_size))


def catalogue_features(num_rows: int) -> KeyedJaggedTensor:
    """Return features of one sample whose ``item__negative`` holds all rows of the item table, 0 to num_rows - 1."""
    nothing = Jagged(np.empty(0, dtype=np.int64), np.zeros(2, dtype=np.int64))
    return _features({ITEM: nothing, TARGET: nothing, NEGATIVE: _lists(np.arange(num_rows), np.array([num_rows]))})


def _singles(items: npt.NDArray[np.integer]) -> Jagged:
    return Jagged(items, np.arange(len(items) + 1))


def _lists(items: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> Jagged:
    return Jagged(items, np.append(0, np.cumsum(lengths)))


def _features(lists: Mapping[str, Jagged]) -> KeyedJaggedTensor:
    values = np.concatenate([lists[name].values for name in SEQUENCE_KEYS], dtype=np.int64)
    return features_of(SEQUENCE_KEYS, values, np.stack([lists[name].lengths for name in SEQUENCE_KEYS]))


def _batch(
    lists: Mapping[str, Jagged], sample_offset: int, global_size: int, step: int, seen: torch.Tensor | None = None
) -> Batch:
    labels = torch.ones(len(lists[ITEM].lengths), dtype=torch.float32)
    return Batch(_features(lists), labels, sample_offset, global_size, step, seen=seen)
