"""The reader of a version whose item rows are in Redis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa

from embeddings.store.backends.redis_rows import Client, RowKeys, gone, read_columns, repack
from embeddings.store.files import RowsGone
from embeddings.store.manifest import VersionManifest
from embeddings.store.version import VersionReader, items_of, keys_of_column, matrix_of
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import MISSING, Array, ItemIdError, ItemVectors, keys_of

ROWS_AT_ONCE = 2048
"""Largest number of rows that one script reads, so that it blocks Redis for other clients for only about 5 ms."""

_ROWS = """
local found, names, width, at, block, start = {}, {}, tonumber(ARGV[1]), 1, 0, 0
for number = 1, #ARGV[2] / 8 do
    block, start, at = struct.unpack('<I4I4', ARGV[2], at)
    local name = names[block]
    if not name then
        name = KEYS[1] .. block
        names[block] = name
    end
    found[number] = redis.call('GETRANGE', name, start, start + width - 1)
end
return {redis.call('EXISTS', KEYS[2]), redis.call('GET', KEYS[3]), table.concat(found)}
"""
"""Script that reads rows of ARGV[1] bytes, each at a (block, first byte) pair, and tests if ``alive`` exists.

The script also returns the value of a third key. A script is atomic in Redis: either all loaded rows exist, or the
reader learns that the version is gone.
"""


class Switched(Exception):
    """A key that the answer depends on has another value than expected."""


class RedisReader(VersionReader):
    """Reader of one version whose rows are in Redis: a lookup is one round trip.

    Ids, statuses and norms of the whole version are read into memory on first use: about 25 bytes per item.

    Raises:
        RowsGone: the rows are no longer in Redis.
    """

    def __init__(
        self,
        client: Client,
        keys: RowKeys,
        manifest: VersionManifest,
        reach: Callable[[], AbstractContextManager[None]],
    ):
        self.manifest = manifest
        self.version = manifest.version
        self.dim = manifest.dim
        self._reach, self._client, self._rows = reach, client, keys
        info = repack(client, keys)
        self._dtype, self._num_chunks = np.dtype(info["dtype"]), int(info["chunks"])
        self._block_rows = max(int(info.get("block_rows", 1)), 1)
        self._script = client.register_script(_ROWS)

    def __len__(self) -> int:
        return self.manifest.rows

    def lookup(self, ids: Any) -> tuple[Array, Array]:
        return self._lookup(ids, None)

    def lookup_given(self, ids: Any, key: bytes, value: bytes) -> tuple[Array, Array] | None:
        """Return the result of :meth:`lookup` if Redis has ``value`` at ``key``, else None.

        The same script reads both. Rows that are gone because another version is served are no error.
        """
        try:
            return self._lookup(ids, (key, value))
        except Switched:
            return None
        except RowsGone:
            with self._reach():
                if self._client.get(key) == value:
                    raise
            return None

    def _lookup(self, ids: Any, given: tuple[bytes, bytes] | None) -> tuple[Array, Array]:
        rows = self.find_rows(self._queries(ids))
        status = np.full(len(rows), MISSING, dtype=np.uint8)
        vectors = np.zeros((len(rows), self.dim), dtype=np.float32)
        present = np.flatnonzero(rows >= 0)
        status[present] = self.statuses.take(rows[present])
        with self._reach():
            for start in range(0, max(len(present), 1), ROWS_AT_ONCE):
                part = present[start : start + ROWS_AT_ONCE]
                vectors[part] = as_float32(self._read(rows[part], given))
        return status, vectors

    def _queries(self, ids: Any) -> Array:
        queries = keys_of(ids, query=True)
        if len(queries) and (queries.dtype.kind == "i") != (self.manifest.id_type == "int64"):
            here, asked = ("integers", "strings") if queries.dtype.kind != "i" else ("strings", "integers")
            raise ItemIdError(f"the ids here are {here}, those asked for are {asked}")
        return queries

    def _read(self, rows: Array, given: tuple[bytes, bytes] | None) -> Array:
        """Read the stored vectors [n, d] of ``rows``, int64 [n]; raise Switched if a key has no ``given`` value."""
        width = self.dim * self._dtype.itemsize
        positions = np.stack([rows // self._block_rows, rows % self._block_rows * width], axis=1).astype("<u4")
        key, expected = given or (self._rows.alive(), None)
        keys = [self._rows.block(""), self._rows.alive(), key]
        is_alive, now, stored = self._script(keys=keys, args=[width, positions.tobytes()])
        if given is not None and now != expected:
            raise Switched
        if not is_alive or len(stored) != len(rows) * width:
            raise gone(self._rows)
        return np.frombuffer(stored, dtype=self._dtype).reshape(len(rows), self.dim)

    @functools.cached_property
    def _columns(self) -> pa.RecordBatch:
        with self._reach():
            return read_columns(self._client, self._rows, self._num_chunks, self.manifest.id_type)

    @functools.cached_property
    def keys(self) -> Array:  # type: ignore[override]
        return keys_of_column(self._columns.column("key"))

    @functools.cached_property
    def statuses(self) -> Array:  # type: ignore[override]
        return self._columns.column("status").to_numpy()

    @functools.cached_property
    def norms(self) -> Array:  # type: ignore[override]
        return self._columns.column("norm").to_numpy()

    @functools.cached_property
    def counts(self) -> Array | None:  # type: ignore[override]
        return self._items.counts

    @functools.cached_property
    def vectors(self) -> Array:  # type: ignore[override]
        return matrix_of(self._batch.column("vector"))

    @functools.cached_property
    def _items(self) -> ItemVectors:  # type: ignore[override]
        return items_of(self._batch)

    @functools.cached_property
    def _batch(self) -> pa.RecordBatch:  # type: ignore[override]
        with self._reach():
            vectors = self._all_vectors()
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), self.dim)
        return self._columns.append_column("vector", column)

    def _all_vectors(self) -> Array:
        vectors = np.empty((len(self), self.dim), dtype=self._dtype)
        for number, start in enumerate(range(0, len(self), self._block_rows)):
            block = self._client.get(self._rows.block(number))
            part = vectors[start : start + self._block_rows]
            if block is None or len(block) != part.nbytes:
                raise gone(self._rows)
            part[:] = np.frombuffer(block, dtype=self._dtype).reshape(part.shape)
        return vectors
