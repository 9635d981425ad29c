"""Reading of batches as tensors: a KeyedJaggedTensor, labels, and the slice's position in the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchrec import KeyedJaggedTensor

from trainer.data.batches.bags import features_of
from trainer.data.batches.batch import Batch
from trainer.data.batches.fresh_negatives import FreshNegatives
from trainer.data.batches.loss_shares import LossShares
from trainer.data.batches.number_columns import VectorColumns, number_columns
from trainer.data.batches.order import rank_slice
from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.batches.sequence_batches import SequenceReader, ranking_batches
from trainer.data.columns.hashing import Int64s
from trainer.data.columns.jagged import Jagged
from trainer.data.prefetch import Prefetched

if TYPE_CHECKING:
    from trainer.data.one_pass.rows import Rows


def train_batches(
    data: PreparedColumns, epoch: int, start_step: int, rank: int, world_size: int, micro_batches: int = 1
) -> Prefetched[Batch]:
    """See :meth:`PreparedData.train_batches`."""
    num_examples, size = data.num_examples["train"], data.batch_size
    order = data.order()
    batch_of = _training_reader(data, epoch)
    shares = LossShares.of_split(data, "train") if data.tasks or data.is_weighted else None

    def make(number: int) -> Batch:
        step, part = divmod(number, micro_batches)
        start = step * size
        global_size = min(size, num_examples - start)
        # Cut the batch into micro-batches, then each micro-batch into the ranks' slices: the ranks' samples of one
        # micro-batch are consecutive.
        begin, end = rank_slice(global_size, part, micro_batches)
        first, last = (begin + bound for bound in rank_slice(end - begin, rank, world_size))
        rows = order.rows(epoch, start + first, start + last)
        batch = batch_of(rows, first, global_size, epoch * data.steps_per_epoch + step, start + first)
        if shares is None:
            return replace(batch, part_offset=begin)
        of_rows = shares.of(rows, order.rows(epoch, start, start + global_size))
        return replace(batch, part_offset=begin, shares=torch.from_numpy(of_rows))

    return Prefetched(make, start_step * micro_batches, data.steps_per_epoch * micro_batches)


def eval_batches(data: PreparedColumns, split: str, batch_size: int, rank: int, world_size: int) -> Prefetched[Batch]:
    """See :meth:`PreparedData.eval_batches`."""
    if data.sequence is not None:
        return ranking_batches(data, split, batch_size, rank, world_size)
    num_examples = data.num_examples[split]
    reader = BatchReader(data, SplitColumns.of(data, split))

    def make(step: int) -> Batch:
        start = step * batch_size
        global_size = min(batch_size, num_examples - start)
        first, last = rank_slice(global_size, rank, world_size)
        return reader.batch(np.arange(start + first, start + last), first, global_size, step, start)

    return Prefetched(make, 0, -(-num_examples // batch_size))


def _training_reader(data: PreparedColumns, epoch: int) -> Callable[[Int64s, int, int, int, int], Batch]:
    if data.sequence is not None:
        return SequenceReader(data, epoch).batch
    negatives = FreshNegatives(data, epoch) if data.is_bpr else None
    return BatchReader(data, SplitColumns.of(data, "train"), negatives).batch


class SplitColumns(NamedTuple):
    """The columns of one split of prepared data."""

    columns: Sequence[npt.NDArray[np.integer] | Jagged]
    weights: Sequence[npt.NDArray[np.float32] | None]
    labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    numbers: npt.NDArray[np.float32] | VectorColumns | None

    @staticmethod
    def of(data: PreparedColumns, split: str) -> SplitColumns:
        """Return the columns of a split, memory-mapped."""
        own = [key for key in data.keys if not (data.is_bpr and key is data.keys[-1])]
        return SplitColumns(
            [data.checked_column(split, key) for key in own],
            [data.weights(split, key) if key.weighted else None for key in own],
            data.labels(split).view(np.ndarray),
            number_columns(data, split),
        )


class BatchReader:
    """Reader that gathers rows of columns into the tensors of a batch."""

    def __init__(self, data: PreparedColumns, rows: SplitColumns | Rows, negatives: FreshNegatives | None = None):
        self._negatives = negatives
        self._names = [key.name for key in data.keys]
        self._columns, self._weights = rows.columns, rows.weights
        self._labels, self._numbers = rows.labels, rows.numbers
        self._is_bpr = data.is_bpr
        self._user = self._names.index("user") if data.is_bpr else -1
        self._single = not data.is_bpr and not any(isinstance(column, Jagged) for column in self._columns)
        flat = [column.dtype for column in self._columns if not isinstance(column, Jagged)]
        self._dtype = flat[0] if flat else np.dtype(np.int32)
        self._ones: tuple[torch.Tensor, torch.Tensor] | None = None

    def batch(self, rows: Int64s, sample_offset: int, global_size: int, step: int, first_sample: int) -> Batch:
        features = self._singles(rows) if self._single else self._bags(rows, first_sample)
        labels = torch.from_numpy(self._labels[rows].astype(np.float32))
        dense = None if self._numbers is None else torch.from_numpy(np.asarray(self._numbers[rows]))
        return Batch(features, labels, sample_offset, global_size, step, dense=dense)

    def _singles(self, rows: Int64s) -> KeyedJaggedTensor:
        """Return the features of rows in which every feature has exactly one id."""
        # The tensors of lengths and offsets are shared with the previous batch and must not be written to.
        count, number = len(rows), len(self._columns)
        if self._ones is None or len(self._ones[0]) != number * count:
            self._ones = torch.ones(number * count, dtype=torch.int64), torch.arange(number * count + 1)
        codes = np.empty((number, count), dtype=self._dtype)
        for index, column in enumerate(self._columns):
            # Rows lie inside every column (checked_column); "clip" lets numpy write into ``out`` without a copy.
            np.take(column, rows, out=codes[index], mode="clip")
        lengths, offsets = self._ones
        values = torch.from_numpy(codes.reshape(-1).astype(np.int64, copy=False))
        return KeyedJaggedTensor(keys=self._names, values=values, lengths=lengths, offsets=offsets, stride=count)

    def _bags(self, rows: Int64s, first_sample: int) -> KeyedJaggedTensor:
        count = len(rows)
        parts = [column.take(rows) if isinstance(column, Jagged) else column[rows] for column in self._columns]
        lengths = np.ones((len(self._names), count), dtype=np.int64)
        flat: list[npt.NDArray[np.integer]] = []
        for number, part in enumerate(parts):
            if isinstance(part, Jagged):
                lengths[number] = part.lengths
            flat.append(part.values if isinstance(part, Jagged) else part)
        if self._negatives is not None:
            users = parts[self._user]
            assert not isinstance(users, Jagged)
            flat.append(self._negatives.draw(users.astype(np.int32, copy=False), first_sample))
        elif self._is_bpr:
            lengths[-1] = 0  # evaluation keeps the key, with empty bags, so that the model always gets the same keys
        values = np.concatenate(flat, dtype=np.int64) if flat else np.empty(0, dtype=np.int64)
        weights = None
        if any(one is not None for one in self._weights):
            weights = torch.from_numpy(self._weights_of(rows, flat))
        return features_of(self._names, values, lengths, weights)

    def _weights_of(self, rows: Int64s, flat: list[npt.NDArray[np.integer]]) -> npt.NDArray[np.float32]:
        """Return the weight of every id of the batch, float32; ids of features without weights have weight 1."""
        parts = [np.ones(len(values), dtype=np.float32) for values in flat]
        for number, weights in enumerate(self._weights):
            column = self._columns[number]
            if weights is not None and isinstance(column, Jagged):
                parts[number] = Jagged(weights, column.offsets).take(rows).values
        return np.concatenate(parts)
