"""The reader of a version whose item rows are in Redis, one key each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa

from embeddings.store.backends.redis_protocol import Client
from embeddings.store.backends.redis_rows import (
    CHUNK_ROWS,
    Columns,
    Given,
    RowKeys,
    RowsReader,
    Switched,
    gone,
    no_columns,
)
from embeddings.store.files import UnknownVersion
from embeddings.store.manifest import VersionManifest
from embeddings.store.version import VersionReader, items_of, matrix_of
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import MISSING, Array, ItemIdError, ItemVectors, keys_of


class RedisReader(VersionReader):
    """Reads one version whose rows are in Redis: a lookup is one MGET.

    Ids, statuses, norms and vectors of the whole version are read when they are first asked for, into memory.
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
        self._reach = reach
        self._rows = RowsReader(client, keys)

    def __len__(self) -> int:
        return self.manifest.rows

    def lookup(self, ids: Any) -> tuple[Array, Array]:
        return self._lookup(ids, None)

    def lookup_given(self, ids: Any, key: bytes, value: bytes) -> tuple[Array, Array] | None:
        """Return :meth:`lookup` if Redis has ``value`` at ``key``, else None.

        Both are asked in the same command. Rows that went with a switch are no error.
        """
        try:
            return self._lookup(ids, Given(key, value))
        except Switched:
            return None
        except UnknownVersion:
            with self._reach():
                if self._rows.client.get(key) == value:
                    raise
            return None

    def _lookup(self, ids: Any, given: Given | None) -> tuple[Array, Array]:
        queries = self._queries(ids)
        with self._reach():
            status, vectors = self._rows.split(self._rows.values(queries, given))
        return status, as_float32(vectors)

    def _queries(self, ids: Any) -> Array:
        queries = keys_of(ids, query=True)
        if len(queries) and (queries.dtype.kind == "i") != (self.manifest.id_type == "int64"):
            here, asked = ("integers", "strings") if queries.dtype.kind != "i" else ("strings", "integers")
            raise ItemIdError(f"the ids here are {here}, those asked for are {asked}")
        return queries

    @functools.cached_property
    def _columns(self) -> Columns:
        if not len(self):
            return no_columns(self.manifest.id_type)
        with self._reach():
            return self._rows.columns()

    @functools.cached_property
    def keys(self) -> Array:  # type: ignore[override]
        return self._columns.keys

    @functools.cached_property
    def statuses(self) -> Array:  # type: ignore[override]
        return self._columns.batch.column("status").to_numpy()

    @functools.cached_property
    def norms(self) -> Array:  # type: ignore[override]
        return self._columns.batch.column("norm").to_numpy()

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
        return self._columns.batch.append_column("vector", column)

    def _all_vectors(self) -> Array:
        """Return all vectors as they are stored, [n, d]."""
        vectors = np.empty((len(self.keys), self.dim), dtype=self._rows.dtype)
        for start in range(0, len(vectors), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            statuses, vectors[part] = self._rows.split(self._rows.values(self.keys[part]))
            if (statuses == MISSING).any():
                raise gone(self._rows.keys)
        return vectors
