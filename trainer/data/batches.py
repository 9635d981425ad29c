"""Batches as tensors: KeyedJaggedTensor, labels, and where the slice lies in the global batch."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torchrec import KeyedJaggedTensor

from trainer.data.hashing import Int64s, derive_key, random_words
from trainer.data.jagged import Jagged
from trainer.data.order import rank_slice
from trainer.data.sequence_batches import SequenceReader, ranking_batches

if TYPE_CHECKING:
    from trainer.data.prepared import PreparedData

PREFETCH_BATCHES = 4
_NEGATIVES = 21


@dataclass(frozen=True)
class Batch:
    """One rank's slice of a global batch, or of one of its micro-batches.

    ``features``: table rows, int64, keys in the fixed order of ``PreparedData.keys``. ``labels``: float32 [b].
    ``sample_offset``: index in the global batch of the slice's first sample. ``global_size``: samples of the whole
    batch. ``part_offset``: index in the global batch of the micro-batch's first sample, which rank 0 holds.
    ``step``: steps before this one since the first epoch (training), or the number of the batch (evaluation).
    ``seen``: for models of sequences in evaluation, int64 [m, 2]: (sample, item row) of all that came before.
    """

    features: KeyedJaggedTensor
    labels: torch.Tensor
    sample_offset: int
    global_size: int
    step: int
    part_offset: int = 0
    seen: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        device = torch.device(device)
        return replace(
            self,
            features=self.features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            seen=None if self.seen is None else self.seen.to(device, non_blocking=non_blocking),
        )

    def pin(self) -> Batch:
        """In page-locked memory, for asynchronous copies to a GPU."""
        return replace(self, features=self.features.pin_memory(), labels=self.labels.pin_memory())


def train_batches(
    data: PreparedData, epoch: int, start_step: int, rank: int, world_size: int, micro_batches: int = 1
) -> Iterator[Batch]:
    """See :meth:`PreparedData.train_batches`."""
    num_examples, size = data.num_examples["train"], data.batch_size
    order = data.order()
    batch_of = _training_reader(data, epoch)

    def make(number: int) -> Batch:
        step, part = divmod(number, micro_batches)
        start = step * size
        global_size = min(size, num_examples - start)
        # The batch in parts, and each part over the ranks: what all ranks compute at once is consecutive.
        begin, end = rank_slice(global_size, part, micro_batches)
        first, last = (begin + place for place in rank_slice(end - begin, rank, world_size))
        rows = order.rows(epoch, start + first, start + last)
        batch = batch_of(rows, first, global_size, epoch * data.steps_per_epoch + step, start + first)
        return replace(batch, part_offset=begin)

    return prefetched(make, start_step * micro_batches, data.steps_per_epoch * micro_batches)


def eval_batches(data: PreparedData, split: str, batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
    """See :meth:`PreparedData.eval_batches`."""
    if data.sequence is not None:
        return ranking_batches(data, split, batch_size, rank, world_size)
    num_examples = data.num_examples[split]
    reader = _Reader(data, split)

    def make(step: int) -> Batch:
        start = step * batch_size
        global_size = min(batch_size, num_examples - start)
        first, last = rank_slice(global_size, rank, world_size)
        return reader.batch(np.arange(start + first, start + last), first, global_size, step, start)

    return prefetched(make, 0, -(-num_examples // batch_size))


def _training_reader(data: PreparedData, epoch: int) -> Callable[[Int64s, int, int, int, int], Batch]:
    if data.sequence is not None:
        return SequenceReader(data, epoch).batch
    return _Reader(data, "train", _FreshNegatives(data, epoch) if data.is_bpr else None).batch


class _FreshNegatives:
    """BPR's negatives: per (seed, epoch, sample), uniform over the items of training that the user never had there."""

    def __init__(self, data: PreparedData, epoch: int):
        self._seen, self._items = data.seen_items
        self._key = derive_key(data.seed, epoch, _NEGATIVES)

    def draw(self, users: npt.NDArray[np.int32], first_sample: int) -> Int64s:
        words = random_words(self._key, np.arange(first_sample, first_sample + len(users)))
        return self._items[self._seen.draw(users, words)]


class _Reader:
    """Gathers rows of one split into tensors."""

    def __init__(self, data: PreparedData, split: str, negatives: _FreshNegatives | None = None):
        self._negatives = negatives
        own = [key for key in data.keys if not (data.is_bpr and key is data.keys[-1])]
        self._names = [key.name for key in data.keys]
        self._columns = [data.column(split, key) for key in own]
        self._labels = data.labels(split)
        self._is_bpr = data.is_bpr
        self._user = [key.name for key in own].index("user") if data.is_bpr else -1

    def batch(
        self,
        rows: Int64s,
        sample_offset: int,
        global_size: int,
        step: int,
        first_sample: int,
    ) -> Batch:
        count = len(rows)
        parts = [column.take(rows) if isinstance(column, Jagged) else column[rows] for column in self._columns]
        lengths = np.ones((len(self._names), count), dtype=np.int64)
        flat: list[npt.NDArray[np.integer]] = []
        for number, part in enumerate(parts):
            if isinstance(part, Jagged):
                lengths[number] = part.lengths
                flat.append(part.values)
            else:
                flat.append(part)
        if self._negatives is not None:
            users = parts[self._user]
            assert not isinstance(users, Jagged)
            flat.append(self._negatives.draw(users, first_sample))
        elif self._is_bpr:
            lengths[-1] = 0  # the key is there in evaluation too, with empty bags: one set of keys for the model
        values = np.concatenate(flat, dtype=np.int64) if flat else np.empty(0, dtype=np.int64)
        offsets = np.zeros(lengths.size + 1, dtype=np.int64)
        np.cumsum(lengths.ravel(), out=offsets[1:])
        features = KeyedJaggedTensor(
            keys=self._names,
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths.ravel()),
            offsets=torch.from_numpy(offsets),
            stride=count,
        )
        labels = torch.from_numpy(self._labels[rows].astype(np.float32))
        return Batch(features, labels, sample_offset, global_size, step)


def prefetched(make: Callable[[int], Batch], start: int, stop: int) -> Iterator[Batch]:
    """``make(start)`` ... ``make(stop - 1)``, made ahead in one thread. Its errors are raised here; a reader that stops
    early ends the thread."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(PREFETCH_BATCHES)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for step in range(start, stop):
                if not put(make(step)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    def read() -> Iterator[Batch]:
        thread = threading.Thread(target=work, name="evenkeel-batches", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            thread.join()

    return read()
