"""An Arrow IPC file of one record batch, written without holding its largest column in memory.

With one batch, a reader can map the file and see the column as one array. The format needs the lengths of all columns
before the bytes of the largest. So Arrow gets a placeholder column of that length, without memory behind it. When Arrow
writes the placeholder's bytes, chunks of the real column are computed, checked and written instead.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embeddings.store.files import FileEntry, HashingFile
from embeddings.vectors.lazy_rows import CHUNK_ROWS, Array, Vectors


def write_streamed(
    path: Path, columns: dict[str, pa.Array], name: str, vectors: Vectors, dtype: Any = np.float32
) -> FileEntry:
    """Write one record batch to ``path``, synced to the disk, and return the manifest's entry of the file.

    The batch has ``columns``, and last the column ``name``: ``vectors`` [n, d] as fixed-size lists of ``dtype``.
    Vectors are read a few thousand at a time.

    Raises:
        ValueError: a row that is not finite in ``dtype``.
    """
    num_rows, dim = vectors.shape
    dtype = np.dtype(dtype)
    # Untouched pages take no memory; the mapping is freed with the last buffer over it.
    nothing = mmap.mmap(-1, max(num_rows * dim * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    placeholder = pa.py_buffer(nothing).slice(0, num_rows * dim * dtype.itemsize)
    flat = pa.Array.from_buffers(pa.from_numpy_dtype(dtype), num_rows * dim, [None, placeholder], null_count=0)
    batch = pa.record_batch({**columns, name: pa.FixedSizeListArray.from_arrays(flat, dim)})
    with contextlib.closing(HashingFile(path)) as file:
        sink = _Sink(file, placeholder, lambda: _chunks(vectors, dtype))
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
    return file.entry()


def _chunks(vectors: Vectors, dtype: np.dtype[Any]) -> Iterator[Array]:
    for start in range(0, len(vectors), CHUNK_ROWS):
        with np.errstate(over="ignore"):
            part = np.ascontiguousarray(vectors[start : start + CHUNK_ROWS], dtype=dtype)
        if not _all_finite(part):
            raise ValueError("a vector is not finite; such rows are carried or left out")
        yield part


def _all_finite(rows: Array) -> bool:
    """Return True if all rows are finite.

    Half-precision rows are judged by their bits: NumPy's isfinite takes 17 times as long.
    """
    if rows.dtype == np.float16 and rows.size:
        return bool((rows.view(np.uint16) & np.uint16(0x7FFF)).max() < 0x7C00)
    return bool(np.isfinite(rows).all())


class _Sink:
    """A file for Arrow to write to: it passes all bytes on, but replaces those of the placeholder by chunks."""

    def __init__(self, file: HashingFile, placeholder: pa.Buffer, chunks: Callable[[], Iterator[Array]]):
        self._file = file
        self._placeholder = placeholder
        self._chunks = chunks
        self.closed = False

    def write(self, data: Any) -> int:
        buffer = pa.py_buffer(data)
        if buffer.address != self._placeholder.address or not buffer.size:
            return self._file.write(buffer)
        if buffer.size != self._placeholder.size:
            raise AssertionError("Arrow cut the column into pieces: the file would not be what was described")
        for part in self._chunks():
            self._file.write(part)
        return int(buffer.size)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
