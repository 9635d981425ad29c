"""What a fetch returns, decoded from an Arrow IPC stream without a copy where none is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Vectors:
    """Vectors in the order they were asked for.

    ``ids`` int64 or string [n]; ``status`` [n] of ``found | carried | missing``; ``vectors`` float32 or float16
    [n, dim], NaN in the rows of missing ids, so that a consumer which forgets to look fails instead of scoring noise.
    """

    version: str
    view: str
    ids: np.ndarray
    status: np.ndarray
    vectors: np.ndarray

    @property
    def found(self) -> np.ndarray:
        """bool [n]: a vector is there (found or carried)."""
        return self.status != "missing"

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    def __len__(self) -> int:
        return len(self.ids)


def table_of(stream: bytes) -> pa.Table:
    """The stream's table; ``schema.metadata`` holds ``version`` and ``view``."""
    with pa.ipc.open_stream(stream) as reader:
        return reader.read_all()


def vectors_of(table: pa.Table) -> Vectors:
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    dim = table.schema.field("vector").type.list_size
    vectors = np.concatenate([_rows(chunk, dim) for chunk in table.column("vector").chunks] or [_NONE.reshape(0, dim)])
    status = np.array(table.column("status").to_pylist(), dtype=str)
    ids = table.column("id").to_numpy()
    return Vectors(metadata.get("version", ""), metadata.get("view", ""), ids, status, vectors)


_NONE = np.empty(0, dtype=np.float32)


def _rows(chunk: Any, dim: int) -> np.ndarray:
    """A chunk of a fixed-size-list column as [n, dim]: a view of its buffer where nothing is null."""
    # .values keeps the slots of null rows, so rows stay where they are.
    slots: np.ndarray = chunk.values.to_numpy(zero_copy_only=True).reshape(-1, dim)
    rows = slots[chunk.offset : chunk.offset + len(chunk)]
    if chunk.null_count:
        rows = rows.copy()
        rows[chunk.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return rows
