"""A column that says which rows train, which validate, which test. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.base import Column
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import LABEL
from trainer.data.prepare.split import SPLIT_NAMES, TEST, TRAIN
from trainer.data.sources.source import Chunk

_REMEDY = "write train, validation or test, or 0 and 1 (true: the row tests); or choose another evaluation.split"


@dataclass(frozen=True)
class Sides(Column):
    """The side of each row."""

    column: str
    name = "sides"

    @property
    def dtype(self) -> np.dtype[Any]:
        return LABEL

    def read(self, chunk: Chunk) -> npt.NDArray[np.uint8]:
        """Return the side of each row: by the names of splits, or TEST where a number or truth value is 1.

        Raises:
            DataError: a value names no split.
        """
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
