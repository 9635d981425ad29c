"""Results of a fetch, decoded from an Arrow IPC stream; vectors are not copied if none is missing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

As = Literal["numpy", "torch", "polars"]


@dataclass(frozen=True)
class Vectors:
    """Vectors in the order in which they were requested.

    ``ids`` int64 or string [n]; ``status`` [n] of ``found | carried | uncertain | missing``; ``vectors`` float32 or
    float16 [n, dim], NaN in the rows of missing ids, so that a consumer that does not check fails instead of computing
    noise. ``etag`` identifies the response to the first request: see ``previous`` of
    :meth:`service.client.Client.vectors`.
    """

    version: str
    view: str
    ids: np.ndarray
    status: np.ndarray
    vectors: np.ndarray
    etag: str = ""

    @property
    def found(self) -> np.ndarray:
        """Mask [n], bool, of the ids that have a vector (found, carried or uncertain)."""
        return self.status != "missing"

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TorchVectors(Vectors):
    """A form of :class:`Vectors` with ``vectors`` and ``found`` as tensors.

    ``ids``, which may be text, and ``status`` are numpy arrays.
    """

    vectors: Any

    @property
    def found(self) -> Any:
        return _imported("torch").from_numpy(self.status != "missing")


def decoded(table: pa.Table, as_: As, etag: str = "") -> Any:
    """Return the table as :class:`Vectors`, :class:`TorchVectors` or a polars DataFrame.

    The DataFrame has the columns ``id, status, vector`` (null where missing).

    Args:
        table: The fetched table.
        as_: ``numpy``, ``torch`` or ``polars``.
        etag: ETag of the response.

    Raises:
        ValueError: ``as_`` is none of these.
        ImportError: The library that ``as_`` names is not installed.
    """
    if as_ == "numpy":
        return vectors_of(table, etag)
    if as_ == "polars":
        polars = _imported("polars")
        frame = polars.from_arrow(table)
        return frame.with_columns(polars.col("status").cast(polars.String))
    if as_ != "torch":
        raise ValueError(f"as_ is '{as_}', expected one of numpy, torch, polars")
    torch = _imported("torch")
    got = vectors_of(table, etag)
    # A copy: the buffers of a stream are read-only, tensors are not.
    return TorchVectors(got.version, got.view, got.ids, got.status, torch.from_numpy(got.vectors.copy()), etag)


def table_of(stream: bytes) -> pa.Table:
    """Return the stream's table; ``schema.metadata`` holds ``version`` and ``view``."""
    with pa.ipc.open_stream(stream) as reader:
        return reader.read_all()


def vectors_of(table: pa.Table, etag: str = "") -> Vectors:
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    field = table.schema.field("vector").type
    parts = [_rows(chunk, field.list_size) for chunk in table.column("vector").chunks]
    none = np.empty((0, field.list_size), dtype=field.value_type.to_pandas_dtype())
    vectors = parts[0] if len(parts) == 1 else np.concatenate([none, *parts])
    status = np.concatenate([np.empty(0, "U7"), *map(_words, table.column("status").chunks)])
    ids = table.column("id").to_numpy()
    return Vectors(metadata.get("version", ""), metadata.get("view", ""), ids, status, vectors, etag)


def _words(chunk: Any) -> np.ndarray:
    """Return a chunk of a column with few distinct words as numpy strings.

    Each distinct word is converted once and then looked up by its dictionary index, which is fifty times as fast.
    """
    words = np.array(chunk.dictionary.to_pylist(), dtype=str)
    return words[chunk.indices.to_numpy()]


def _rows(chunk: Any, dim: int) -> np.ndarray:
    """Return a chunk of a fixed-size-list column as an array [n, dim]: without a copy if no value is null."""
    # .values keeps the slots of null rows, so rows stay where they are.
    slots: np.ndarray = chunk.values.to_numpy(zero_copy_only=True).reshape(-1, dim)
    rows = slots[chunk.offset : chunk.offset + len(chunk)]
    if chunk.null_count:
        rows = rows.copy()
        rows[chunk.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return rows


def _imported(name: str) -> Any:
    """Import a library that only one value of ``as_`` needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"as_='{name}' needs the package {name}: pip install {name}") from error
