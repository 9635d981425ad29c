"""One immutable version of a collection: writing its items, and reading them from memory-mapped Arrow.

``items.arrow`` is an Arrow IPC file of one record batch, sorted by id. Its columns are ``key`` (int64, or fixed-size
binary: UTF-8 padded with NUL), ``status`` (uint8), ``norm`` (float32), ``count`` (int64, -1 unknown) and, last,
``vector`` (fixed-size list of float32 or float16). A version written by a refresh also has ``carried_for`` and
``last_found`` (int32, see ItemVectors) before ``vector``. A version with users has ``bias`` (float32) there, if its
model's items have biases.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing, file_sha256
from embeddings.store.arrow_stream import write_streamed
from embeddings.store.files import CorruptStore, FileEntry, HashingFile
from embeddings.store.manifest import VersionManifest
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.id_index import IdIndex
from embeddings.vectors.item_vectors import (
    FOUND,
    MISSING,
    STATUS_NAMES,
    UNCERTAIN,
    Array,
    ItemVectors,
    arrow_of,
    find_rows,
    keys_of,
)
from embeddings.vectors.lazy_rows import Widened

ITEMS_FILE = "items.arrow"


def write_items(path: Path, items: ItemVectors, dtype: Any = np.float32) -> FileEntry:
    """Write ``items`` to ``path``, synced to the disk, with vectors as ``dtype``; return the file's manifest entry.

    Raises:
        ValueError: a vector that is not finite.
    """
    counts = np.full(len(items), -1, dtype=np.int64) if items.counts is None else items.counts
    columns = {
        "key": key_column(items.keys),
        "status": pa.array(items.statuses),
        "norm": pa.array(items.norms),
        "count": pa.array(counts),
    }
    if items.carried_for is not None and items.last_found is not None:
        columns |= {"carried_for": pa.array(items.carried_for), "last_found": pa.array(items.last_found)}
    if items.biases is not None:
        columns["bias"] = pa.array(items.biases)
    return write_streamed(path, columns, "vector", items.vectors, dtype)


def write_arrow(path: Path, batch: pa.RecordBatch) -> FileEntry:
    """Write one record batch as an Arrow IPC file, synced to the disk, and return the file's manifest entry."""
    with contextlib.closing(HashingFile(path)) as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
    return file.entry()


_verified: set[tuple[Any, ...]] = set()
_verifying = threading.Lock()
_refused: dict[tuple[Any, ...], str] = {}
_SETTLED_SECONDS = 2.0


def verify_file(directory: Path, entry: FileEntry) -> Path:
    """Check the size and sha256 of a file that a manifest lists, and return its path.

    The sha256 is computed once per process and file; a damaged file is refused again at once until it is replaced.

    Raises:
        CorruptStore: the file is gone or damaged.
    """
    path = directory / entry.name
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise CorruptStore(f"{path}: the file is gone though the manifest lists it: {_remedy(directory)}") from None
    if status.st_size != entry.bytes:
        sizes = f"{status.st_size} bytes, the manifest says {entry.bytes}"
        raise CorruptStore(f"{path}: {sizes}: the file is damaged; {_remedy(directory)}")
    mark = _mark(path, status, entry)
    if mark in _verified:
        return path
    # After a switch all readers of a process come here at once: one reads the file, the others wait for the result.
    with _verifying:
        if mark in _verified:
            return path
        if mark in _refused:
            raise CorruptStore(_refused[mark])
        if file_sha256(path) == entry.sha256:
            _verified.add(mark)
            return path
        message = f"{path}: the sha256 is not the manifest's: the file is damaged; {_remedy(directory)}"
        # A file written just now may be rewritten within the same clock tick, so its damage is not remembered.
        if time.time() - status.st_mtime > _SETTLED_SECONDS:
            _refused[mark] = message
        raise CorruptStore(message)


def mark_verified(directory: Path, entry: FileEntry) -> None:
    """Record that this process hashed the file while writing it, so that ``verify_file`` does not read it again."""
    path = directory / entry.name
    _verified.add(_mark(path, os.stat(path), entry))


def _mark(path: Path, status: os.stat_result, entry: FileEntry) -> tuple[Any, ...]:
    return (str(path), status.st_ino, status.st_mtime_ns, status.st_size, entry.sha256)


def _remedy(directory: Path) -> str:
    return f"restore {directory} from a backup, or promote another version"


def read_arrow(path: Path) -> pa.RecordBatch:
    """Return the one record batch of an Arrow IPC file, memory-mapped.

    Raises:
        CorruptStore: the file has more record batches, or none.
    """
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    if reader.num_record_batches != 1:
        raise CorruptStore(f"{path}: {reader.num_record_batches} record batches, expected one")
    return reader.get_batch(0)


def items_of(batch: pa.RecordBatch) -> ItemVectors:
    """Return the rows of a record batch that ``write_items`` wrote, without copies of keys and vectors."""
    columns: dict[str, Array] = {name: batch.column(name).to_numpy() for name in batch.schema.names[1:-1]}
    statuses = columns["status"]
    stored = matrix_of(batch.column("vector"))
    return ItemVectors(
        keys_of_column(batch.column("key")),
        Widened(stored) if stored.dtype == np.float16 else stored,
        norms=columns["norm"],
        evidence=(statuses == FOUND) | (statuses == UNCERTAIN),
        counts=columns["count"] if len(stored) and columns["count"][0] >= 0 else None,
        statuses=statuses,
        carried_for=columns.get("carried_for"),
        last_found=columns.get("last_found"),
        biases=columns.get("bias"),
    )


def key_column(keys: Array) -> pa.Array:
    """Return keys as the Arrow column ``key``, without a copy if they are contiguous."""
    if keys.dtype.kind == "i":
        return pa.array(keys)
    buffer = pa.py_buffer(np.ascontiguousarray(keys))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(keys.dtype.itemsize), len(keys), [None, buffer])


def keys_of_column(column: pa.Array) -> Array:
    """Return the keys in a column that :func:`key_column` made, without a copy."""
    dtype = "<i8" if pa.types.is_int64(column.type) else f"S{column.type.byte_width}"
    return np.frombuffer(column.buffers()[1], dtype=dtype)[column.offset : column.offset + len(column)]


def matrix_of(column: pa.Array) -> Array:
    """Return a column of fixed-size lists as [rows, list size], without a copy."""
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)


class VersionReader:
    """Reader of one version; files are memory-mapped and stay readable after another version is served; thread-safe.

    Attributes:
        keys: sorted ids: int64 or bytes.
        vectors: float32 or float16 [n, dim] as stored.
        statuses: uint8 [n].
        norms: float32 [n].
        counts: int64 [n] or None.
    """

    def __init__(self, directory: Path, manifest: VersionManifest):
        self._batch = batch = read_arrow(verify_file(directory, manifest.items_file))
        self.manifest = manifest
        self.version = manifest.version
        self.dim = manifest.dim
        self._items = items = items_of(batch)
        self.keys: Array = items.keys
        self.statuses: Array = items.statuses
        self.norms: Array = items.norms
        self.counts: Array | None = items.counts
        self.vectors: Array = matrix_of(batch.column("vector"))

    def __len__(self) -> int:
        return len(self.keys)

    @functools.cached_property
    def ids(self) -> pa.Array:
        """Ids, sorted, as an Arrow array of int64 or string."""
        return arrow_of(self.keys)

    def items(self) -> ItemVectors:
        """Return the whole version, without copies of the vectors."""
        return self._items

    def lookup(self, ids: Any) -> tuple[Array, Array]:
        """Return (status uint8 [n], vectors float32 [n, dim]) of ``ids``, in the order given, duplicates kept.

        Status is 0 missing, 1 found, 2 carried, 3 uncertain; the vector of a missing id is zero.

        Raises:
            ItemIdError: ids of another type.
        """
        queries = keys_of(ids, query=True)
        if not len(self.keys) or not len(queries):
            return np.full(len(queries), MISSING, dtype=np.uint8), np.zeros((len(queries), self.dim), dtype=np.float32)
        rows = self.find_rows(queries)
        absent = (rows < 0).nonzero()[0]
        rows[absent] = 0
        status = self.statuses.take(rows)
        vectors = as_float32(self.vectors.take(rows, axis=0))
        status[absent] = MISSING
        vectors[absent] = 0.0
        return status, vectors

    def find_rows(self, queries: Array) -> Array:
        """Return the row number of each query in the version, int64 [n]; -1 if the version lacks it.

        Queries are keys as embeddings.vectors.item_vectors.keys_of makes them of ids.

        Raises:
            ItemIdError: ids of another type.
        """
        if queries.dtype.kind != "i" or self.keys.dtype.kind != "i" or not len(self.keys):
            return find_rows(self.keys, queries)
        return self._index.rows(queries)

    @functools.cached_property
    def _index(self) -> IdIndex:
        return IdIndex(self.keys)

    def snapshot(self, path: Path | str) -> Path:
        """Write the version to a Parquet file in one step, with columns id, status (a word), norm, count and vector.

        The file's metadata names collection, version and anchor generation.
        """
        path = Path(path)
        names = pa.array(list(STATUS_NAMES))
        metadata = {
            f"evenkeel.{name}": str(getattr(self.manifest, name))
            for name in ("collection", "version", "anchor_generation")
        }
        table = pa.table(
            {
                "id": self.ids,
                "status": pa.DictionaryArray.from_arrays(pa.array(self.statuses, pa.int8()), names),
                "norm": self._batch.column("norm"),
                "count": self._batch.column("count"),
                "vector": self._batch.column("vector"),
            }
        ).replace_schema_metadata(metadata)
        with appearing(path, durable=False) as partial:
            pq.write_table(table, partial)
        return path


def num_carried(items: ItemVectors) -> int:
    """Return the number of items whose vector was carried over from an earlier version."""
    return int(np.count_nonzero((items.statuses != MISSING) & ~items.renewed))
