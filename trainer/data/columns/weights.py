"""Lists of ids with weights, pooled to sum_j w_j e_j, or for mean to sum_j w_j e_j / sum_j w_j. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.base import Column
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import as_floats
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import VALUE
from trainer.data.sources.source import Chunk

if TYPE_CHECKING:
    from trainer.data.columns.ids import IdColumn


class Weighted(NamedTuple):
    """Lists of ids with weights; ``bad`` [rows] marks rows whose ids and weights do not match, with empty lists."""

    elements: pa.Array
    lengths: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    bad: npt.NDArray[np.bool_]


def weighted_lists(chunk: Chunk, use: IdColumn) -> Weighted:
    """Return the rows' ids and weights; null ids are left out with their weights."""
    assert use.weights is not None
    ids, of, no_ids = values.raw_lists(chunk.column(use.column))
    given, of_given, no_weights = values.raw_lists(chunk.column(use.weights))
    count = len(chunk)
    numbers, wrong = as_floats(given)
    wrong = wrong | np.isnan(numbers) | (numbers < 0)
    bad = no_ids | no_weights | (np.bincount(of, minlength=count) != np.bincount(of_given, minlength=count))
    bad[of_given[wrong]] = True
    good = ~bad[of]
    ids, of, numbers = ids.filter(pa.array(good)), of[good], numbers[~bad[of_given]]
    there = ids.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.bincount(of[there], minlength=count).astype(np.int64)
    return Weighted(ids.filter(pa.array(there)), lengths, numbers[there].astype(VALUE), bad)


def require_weighted(chunk: Chunk, use: IdColumn) -> Weighted:
    """Return :func:`weighted_lists`, in which no row may be bad.

    Raises:
        DataError: at the first list whose weights do not match its ids.
    """
    lists = weighted_lists(chunk, use)
    if lists.bad.any():
        row = int(np.flatnonzero(lists.bad)[0])
        raise DataError(
            f"the weights {chunk.column(str(use.weights))[row].as_py()!r} do not match the ids "
            f"{chunk.column(use.column)[row].as_py()!r}: there must be one weight for each id, at least 0",
            where=chunk.where(str(use.weights), row),
            remedy="correct them, remove the row, or set max_bad_rows of the dataset",
        )
    return lists


@dataclass(frozen=True)
class ListWeights(Column):
    """The weights of a list: a value for each of its ids."""

    name: str
    use: IdColumn

    def read(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        return require_weighted(chunk, self.use).weights


def weights_name(use: IdColumn) -> str:
    """Return the name of a list's weights among the columns of a plan."""
    return f"weights {use.column} {use.weights}"


def as_factors(weights: Jagged, pooling: str) -> npt.NDArray[np.float32]:
    """Return the factors by which embedding rows are multiplied before pooling.

    Mean pooling divides by the number of rows, so each list's weights are scaled to a mean of 1. A list whose weights
    are all 0 gets no rows.
    """
    factors = np.asarray(weights.values, dtype=np.float64)
    if pooling == "mean":
        lengths = weights.lengths
        owner = np.repeat(np.arange(len(lengths)), lengths)
        sums = np.bincount(owner, factors, minlength=len(lengths))
        scale = np.divide(lengths, sums, out=np.zeros(len(lengths)), where=sums > 0)
        factors = factors * scale[owner]
    return factors.astype(VALUE)
