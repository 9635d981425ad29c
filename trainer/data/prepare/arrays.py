"""Raw columns on disk: appended to while preparing, memory-mapped afterwards. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.jagged import Jagged

CODE = np.dtype(np.int32)
OFFSET = np.dtype(np.int64)
LABEL = np.dtype(np.uint8)
VALUE = np.dtype(np.float32)
LABELS = "rows.labels.bin"
"""File of a split: labels, [examples] or [examples, labels]; NaN for an absent label.

No feature can have this name.
"""
ROW_WEIGHTS = "rows.weights.float32"
"""File of a split: weights of its rows, if the dataset has weights. No feature can have this name."""
USER_CODES = "user.codes.bin"
"""File of a split: the number of each example's user. No feature can have this name."""
ITEM_PLACES = "item.places.bin"
"""File of a split: each example's item as a position in the catalogue, or -1. No feature can have this name."""
NUMBERS = "numeric.values.float32"
"""File of a split: numeric features as the model reads them, [examples, features]."""


def vector_file(directory: Path, feature: str) -> Path:
    """Return the file with the vectors of a feature, [rows, dim], in a split or the catalogue."""
    return directory / f"{feature}.vectors.float32"


def weight_file(directory: Path, feature: str) -> Path:
    """Return the file with the weights of a list feature's ids, in a split."""
    return directory / f"{feature}.weights.bin"


class Appender:
    """A one-dimensional array that grows on disk: ``<path>`` holds only the values, of type ``dtype``.

    With ``length``, the file's first ``length`` values are kept and the rest is cut off.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, length: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.dtype = np.dtype(dtype)
        self.length = length
        self._file = open(path, "r+b" if length else "wb")  # noqa: SIM115 - closed by close()
        self._file.truncate(length * self.dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.length += len(values)

    def flush(self) -> None:
        """Hand appended values to the operating system, so that :meth:`mapped` sees them."""
        self._file.flush()

    def sync(self) -> None:
        """Wait until all appended values are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def mapped(self) -> npt.NDArray[Any]:
        """Return the written values, memory-mapped; after :meth:`close`."""
        return map_array(self.path, self.dtype)


class JaggedAppender:
    """Lists that grow on disk: ``<stem>.values.bin`` and ``<stem>.offsets.bin`` (the leading 0 included)."""

    def __init__(self, stem: Path, dtype: npt.DTypeLike, lengths: tuple[int, int] = (0, 0)):
        self._stem = stem
        self.values = Appender(stem.with_name(stem.name + ".values.bin"), dtype, lengths[0])
        self.offsets = Appender(stem.with_name(stem.name + ".offsets.bin"), OFFSET, lengths[1])
        if self.offsets.length == 0:
            self.offsets.append(np.zeros(1, dtype=np.int64))

    def append(self, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        self.offsets.append(self.values.length + np.cumsum(lengths))
        self.values.append(values)

    def close(self) -> None:
        self.values.close()
        self.offsets.close()

    def mapped(self) -> Jagged:
        """Return the written values, memory-mapped; after :meth:`close`."""
        return map_jagged(self._stem, self.values.dtype)


def write_array(path: Path, values: npt.NDArray[Any], dtype: npt.DTypeLike) -> None:
    """Write a file that holds only the values, converted to ``dtype``."""
    appender = Appender(path, dtype)
    appender.append(values)
    appender.close()


def map_array(path: Path, dtype: npt.DTypeLike, mode: Any = "r") -> npt.NDArray[Any]:
    """Return the array in ``path``, memory-mapped; an empty array for an empty file, which cannot be mapped."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode=mode)


def write_ids(path: Path, ids: pa.Array) -> None:
    batch = pa.record_batch([ids], names=["id"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def open_ids(path: Path) -> pa.Array:
    """Return the ids in a file that :func:`write_ids` wrote, memory-mapped."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0).column(0)


def map_jagged(stem: Path, dtype: npt.DTypeLike) -> Jagged:
    return Jagged(
        map_array(stem.with_name(stem.name + ".values.bin"), dtype),
        map_array(stem.with_name(stem.name + ".offsets.bin"), OFFSET),
    )
