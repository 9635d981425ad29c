"""Rows as batches are cut from them: hashes of ids, labels, numbers, weights. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.hashing import id_keys, mix
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.vocabulary import encoded

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

MISSING = int(mix(np.array([1 << 63], dtype=np.uint64)).view(np.int64)[0])
"""Stands for a missing id among hashes: that of the integer -2^63, which is read as missing."""


@dataclass(frozen=True)
class Rows:
    """Some rows, in the order in which they are read or trained on.

    Attributes:
        columns: for each key of the batches the hash of each row's id, int64 [rows], or lists of them.
        weights: for each key what the values of its lists are multiplied with; None where it has none.
        labels: [rows], of several [rows, labels].
        numbers: float32 [rows, numeric features], None without any.
        row_weights: float32 [rows], None where rows have none.
    """

    columns: tuple[Int64s | Jagged, ...]
    weights: tuple[Float32s | None, ...]
    labels: npt.NDArray[Any]
    numbers: Float32s | None
    row_weights: Float32s | None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Int64s) -> Rows:
        """Return the rows of these numbers, in their order."""
        columns, weights = [], []
        for column, factors in zip(self.columns, self.weights, strict=True):
            columns.append(column.take(rows) if isinstance(column, Jagged) else column[rows])
            if factors is not None:
                assert isinstance(column, Jagged)
                factors = Jagged(factors, column.offsets).take(rows).values
            weights.append(factors)
        return Rows(
            tuple(columns),
            tuple(weights),
            self.labels[rows],
            _taken(self.numbers, rows),
            _taken(self.row_weights, rows),
        )

    def then(self, others: Rows) -> Rows:
        """Return these rows and the others after them; lists of both begin at 0."""
        columns: list[Int64s | Jagged] = []
        for one, other in zip(self.columns, others.columns, strict=True):
            if isinstance(one, Jagged):
                assert isinstance(other, Jagged)
                offsets = np.concatenate([one.offsets, one.offsets[-1] + other.offsets[1:]])
                columns.append(Jagged(np.concatenate([one.values, other.values]), offsets))
            else:
                assert not isinstance(other, Jagged)
                columns.append(np.concatenate([one, other]))
        weights = [_joined(*factors) for factors in zip(self.weights, others.weights, strict=True)]
        return Rows(
            tuple(columns),
            tuple(weights),
            np.concatenate([self.labels, others.labels]),
            _joined(self.numbers, others.numbers),
            _joined(self.row_weights, others.row_weights),
        )


def hashed(ids: pa.Array) -> Int64s:
    """Return the hash of each id, int64 [n], :data:`MISSING` where it is null."""
    if pa.types.is_int64(ids.type):
        keys = id_keys(pc.fill_null(ids, 0)).view(np.int64)
        return np.where(ids.is_valid().to_numpy(zero_copy_only=False), keys, MISSING) if ids.null_count else keys
    # Arrow is faster at finding out which strings are equal than numpy is at hashing them.
    distinct, places = encoded(ids)
    return np.append(id_keys(distinct).view(np.int64), MISSING)[places]


def _taken(values: Float32s | None, rows: Int64s) -> Float32s | None:
    return None if values is None else values[rows]


def _joined(first: Float32s | None, second: Float32s | None) -> Float32s | None:
    if first is None or second is None:
        return None
    return np.concatenate([first, second])
