"""Rows of vectors in a file without a name, which is freed with the array."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt


def temporary_rows(directory: Path, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return a writable float32 array in an unnamed file, whose disk space is allocated at once.

    Raises:
        OSError: the disk is full. Without allocation, a later write to the array would crash the process instead.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, max(4 * shape[0] * shape[1], 1))
        return np.memmap(file, np.float32, "r+", shape=shape)
