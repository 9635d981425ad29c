"""Rows of one-pass training, from which batches are cut: hashes of ids, labels, numbers, weights. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.hashing import Int64s, id_keys, mix
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.vocabulary import encoded

Float32s = npt.NDArray[np.float32]

MISSING = int(mix(np.array([1 << 63], dtype=np.uint64)).view(np.int64)[0])
"""Hash that represents a missing id: the hash of the integer -2^63, which is thereby read as missing, too."""


@dataclass(frozen=True)
class Rows:
    """Some rows, in the order in which they are read or trained on.

    Attributes:
        columns: for each key of the batches, the hash of each row's id, int64 [rows], or lists of hashes.
        weights: for each key, a factor for each element of its lists, float32; None if the key has no weights.
        labels: [rows], or [rows, labels] if there are several labels.
        numbers: numeric features, float32 [rows, features]; None if there are none.
        row_weights: float32 [rows]; None if rows have no weights.
        raw_ids: strings behind the hashes of one table, at least for these rows' ids; None if strings are not kept.
    """

    columns: tuple[Int64s | Jagged, ...]
    weights: tuple[Float32s | None, ...]
    labels: npt.NDArray[Any]
    numbers: Float32s | None
    row_weights: Float32s | None
    raw_ids: RawIds | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Int64s) -> Rows:
        """Return the rows with these numbers, in the order of the numbers."""
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
            self.raw_ids,
        )

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts, one part after the other; offsets of lists in each part must begin at 0."""
        first = parts[0]
        if len(parts) == 1:
            return first
        columns = [_joined_column([part.columns[number] for part in parts]) for number in range(len(first.columns))]
        weights = [_joined([part.weights[number] for part in parts]) for number in range(len(first.weights))]
        return Rows(
            tuple(columns),
            tuple(weights),
            np.concatenate([part.labels for part in parts]),
            _joined([part.numbers for part in parts]),
            _joined([part.row_weights for part in parts]),
            None if first.raw_ids is None else RawIds.joined([part.raw_ids for part in parts if part.raw_ids]),
        )


def hashed_with_strings(ids: pa.Array) -> tuple[Int64s, pa.Array | None]:
    """Return the hash of each id, int64, with :data:`MISSING` for null; and the distinct ids if they are strings."""
    if pa.types.is_int64(ids.type):
        keys = id_keys(pc.fill_null(ids, 0)).view(np.int64)
        valid = ids.is_valid().to_numpy(zero_copy_only=False)
        return (np.where(valid, keys, MISSING) if ids.null_count else keys), None
    # Arrow is faster at finding out which strings are equal than numpy is at hashing them.
    distinct, places = encoded(ids)
    return np.append(id_keys(distinct).view(np.int64), MISSING)[places], distinct


def _taken(values: Float32s | None, rows: Int64s) -> Float32s | None:
    return None if values is None else values[rows]


def _joined(parts: Sequence[Float32s | None]) -> Float32s | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


def _joined_column(parts: Sequence[Int64s | Jagged]) -> Int64s | Jagged:
    lists = [part for part in parts if isinstance(part, Jagged)]
    if not lists:
        return np.concatenate([part for part in parts if not isinstance(part, Jagged)])
    starts = np.cumsum([0, *(part.offsets[-1] for part in lists)])
    ends = [part.offsets[1:] + start for part, start in zip(lists, starts[:-1], strict=True)]
    return Jagged(np.concatenate([part.values for part in lists]), np.concatenate([starts[:1], *ends]))


@dataclass(frozen=True)
class RawIds:
    """Distinct strings, in ascending order of their hashes.

    ``keys`` are hashes of the strings, int64 [n], ascending; ``ids`` the strings, large_string [n].
    """

    keys: Int64s
    ids: pa.Array

    @staticmethod
    def of(distinct: pa.Array) -> RawIds:
        """Return the given strings with their hashes; the strings must be distinct and not null."""
        keys = id_keys(distinct).view(np.int64)
        order = np.argsort(keys)
        return RawIds(keys[order], distinct.take(pa.array(order)))

    @staticmethod
    def joined(parts: Sequence[RawIds]) -> RawIds:
        """Return the strings of all parts, each once."""
        if len(parts) == 1:
            return parts[0]
        keys, first = np.unique(np.concatenate([part.keys for part in parts]), return_index=True)
        return RawIds(keys, pa.concat_arrays([part.ids for part in parts]).take(pa.array(first)))

    def of_keys(self, keys: Int64s) -> list[str]:
        """Return the string of each hash; every hash must be in :attr:`keys`."""
        return self.ids.take(pa.array(np.searchsorted(self.keys, keys))).to_pylist()
