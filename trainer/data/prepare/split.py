"""Assignment of rows to the training, validation and test splits. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.base import Column
from trainer.data.columns.hashing import UInt64s, derive_key, mix, unit_interval
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import LABEL
from trainer.data.sources.source import Chunk
from trainer.spec import Split

TRAIN, VALIDATION, TEST, DROPPED = 0, 1, 2, 3
SPLIT_NAMES = ("train", "validation", "test")
# One seed for all jobs: a pair that one job tests on is in no other job's training split, so that a warm start and a
# comparison of seeds do not leak.
SPLIT_SEED = 0x5EED


def random_split(split: Split, pair_keys: UInt64s) -> npt.NDArray[np.uint8]:
    """Split by hash of the pair: rows with equal keys get the same split, whatever the order and number of rows."""
    with np.errstate(over="ignore"):
        uniform = unit_interval(mix(pair_keys + np.uint64(derive_key(SPLIT_SEED))))
    sides = np.full(len(pair_keys), TRAIN, dtype=np.uint8)
    sides[uniform < split.test + split.validation] = VALIDATION
    sides[uniform < split.test] = TEST
    return sides


def per_user_last(split: Split, users: npt.NDArray[Any], order: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Split by leaving out the last rows of each user.

    In ``order`` (then by row number), the last ``num_test`` rows of a user are for test, the ``num_validation`` rows
    before them for validation; by default one row each (leave-last-two-out).

    A split of fraction 0 gets no row. A user's first row is always for training: a single row has no held-out row, and
    two rows have only a test row. Rows without a user (-1) are for training.
    """
    count = len(users)
    by_user = np.lexsort((np.arange(count), order, users))
    sorted_users = np.asarray(users)[by_user]
    starts = np.flatnonzero(np.r_[True, sorted_users[1:] != sorted_users[:-1]]) if count else np.empty(0, np.int64)
    lengths = np.diff(np.append(starts, count))
    from_end = np.repeat(starts + lengths, lengths) - 1 - np.arange(count)
    from_start = np.arange(count) - np.repeat(starts, lengths)
    num_test = split.num_test if split.test > 0 else 0
    num_held = num_test + (split.num_validation if split.validation > 0 else 0)
    sorted_sides = np.where(from_end < num_test, TEST, np.where(from_end < num_held, VALIDATION, TRAIN))
    sorted_sides[(from_start == 0) | (sorted_users < 0)] = TRAIN
    sides = np.empty(count, dtype=np.uint8)
    sides[by_user] = sorted_sides
    return sides


class TimeLimits(NamedTuple):
    """Earliest times of the validation and of the test split; None if that split is empty."""

    validation: Any
    test: Any

    def sides(self, order: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the split of rows with these times, uint8 [rows], as its number in ``SPLIT_NAMES``."""
        sides = np.full(len(order), TRAIN, dtype=np.uint8)
        for limit, side in ((self.validation, VALIDATION), (self.test, TEST)):
            if limit is not None:
                sides[order >= limit] = side
        return sides


def time_limits(split: Split, order: npt.NDArray[Any]) -> TimeLimits:
    """Return the times from which rows are for validation and for test: the latest shares of all rows.

    Rows of equal times all go to the later split.
    """
    count = len(order)
    ordered = np.sort(order)
    num_test = int(count * split.test)
    num_held = num_test + int(count * split.validation)
    return TimeLimits(ordered[count - num_held] if num_held else None, ordered[count - num_test] if num_test else None)


_REMEDY = "write train, validation or test, or 0 and 1 (true: the row tests); or choose another evaluation.split"


@dataclass(frozen=True)
class Sides(Column):
    """Column of the rows that names the split of each row."""

    column: str
    name = "sides"
    dtype = LABEL

    def read(self, chunk: Chunk) -> npt.NDArray[np.uint8]:
        """Return the split of each row: by its name, or TEST where a number or truth value is 1."""
        array = chunk.column(self.column)
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.int8())
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            places = pc.index_in(array.cast(pa.large_string()), value_set=pa.array(SPLIT_NAMES, pa.large_string()))
            sides = pc.fill_null(places, -1).to_numpy(zero_copy_only=False)
        elif pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
            numbers = pc.fill_null(array.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False)
            sides = np.where(numbers == 1, TEST, np.where(numbers == 0, TRAIN, -1))
        else:
            raise DataError(f"holds {array.type}, which names no split", where=chunk.where(self.column), remedy=_REMEDY)
        bad = np.flatnonzero(sides < 0)
        if len(bad):
            raise DataError(
                f"{array[int(bad[0])].as_py()!r} names no split",
                where=chunk.where(self.column, int(bad[0])),
                remedy=_REMEDY,
            )
        return sides.astype(np.uint8)
