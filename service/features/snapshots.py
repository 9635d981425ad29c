"""A version as a stream of Parquet: one row group at a time, so that neither memory nor a disk holds all of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.store import VersionReader
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import STATUS_NAMES, arrow_of, chunks

PARQUET = "application/vnd.apache.parquet"
GROUP_VALUES = 2**22
"""Number of vector coordinates in a row group: 16 MB as float32."""


class _Sink:
    """File-like object to which Parquet is written and from which the response reads."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._written = 0

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data


def parquet_chunks(reader: VersionReader) -> Iterator[bytes]:
    """Yield the version as Parquet: id, status (word), norm, count, vector.

    The metadata contains collection, version and anchor generation. If the caller stops iterating, nothing is left
    behind.
    """
    names = ("collection", "version", "anchor_generation")
    metadata = {f"evenkeel.{name}": str(getattr(reader.manifest, name)) for name in names}
    words = pa.array(list(STATUS_NAMES))
    counts = np.full(len(reader), -1, dtype=np.int64) if reader.counts is None else reader.counts

    def group(part: slice) -> pa.Table:
        flat = pa.array(as_float32(reader.vectors[part]).reshape(-1))
        columns = {
            "id": arrow_of(reader.keys[part]),
            "status": pa.DictionaryArray.from_arrays(pa.array(reader.statuses[part], pa.int8()), words),
            "norm": pa.array(reader.norms[part]),
            "count": pa.array(counts[part]),
            "vector": pa.FixedSizeListArray.from_arrays(flat, reader.dim),
        }
        return pa.table(columns).replace_schema_metadata(metadata)

    sink = _Sink()
    with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), group(slice(0, 0)).schema) as writer:
        for part in chunks(len(reader), max(GROUP_VALUES // reader.dim, 1)):
            writer.write_table(group(part))
            yield sink.take()
    yield sink.take()
