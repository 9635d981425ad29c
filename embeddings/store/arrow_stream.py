"""An Arrow IPC file of one record batch, written without having its largest column in memory.

A reader maps such a file and has the column as one array, which several batches would not give it. The format needs the
lengths of all columns before the first byte of the largest one: so the batch is described with a column of that length
which has no memory behind it, and where its bytes are due, chunks are computed, checked and written in their place.
"""

from __future__ import annotations

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
    """Write one record batch to ``path`` durably, and return the manifest's entry for the file.

    Its last column, ``name``, has ``vectors`` [n, d] as fixed-size lists of ``dtype``, read a few thousand at a time.

    Raises:
        ValueError: a row that is not finite in ``dtype``.
    """
    num_rows, dim = vectors.shape
    dtype = np.dtype(dtype)
    # Pages of it that nobody touches take no memory; it goes when the last buffer over it does.
    nothing = mmap.mmap(-1, max(num_rows * dim * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    placeholder = pa.py_buffer(nothing).slice(0, num_rows * dim * dtype.itemsize)
    flat = pa.Array.from_buffers(pa.from_numpy_dtype(dtype), num_rows * dim, [None, placeholder], null_count=0)
    batch = pa.record_batch({**columns, name: pa.FixedSizeListArray.from_arrays(flat, dim)})
    file = HashingFile(path)
    try:
        sink = _Sink(file, placeholder, lambda: _chunks(vectors, dtype))
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
    finally:
        file.close()
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
    """The file that Arrow writes to: passes everything on, but chunks in place of the placeholder."""

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
