"""Item vectors as refreshes and the feature store exchange them: ids, directions, norms, evidence, counts.

Ids are int64 or UTF-8 strings. Inside, both are numpy *keys* that sort and compare quickly: int64 as they are, strings
as fixed-width bytes (``S`` dtype), whose order is that of UTF-8, which is that of the code points. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embeddings.vectors.lazy_rows import CHUNK_ROWS, Array, Picked, Rows, Vectors

MISSING, FOUND, CARRIED, UNCERTAIN = 0, 1, 2, 3
STATUS_NAMES = ("missing", "found", "carried", "uncertain")

MAX_ID_BYTES = 512
# Range of squared norms in which float32 squares lose no precision of float32 rows.
_SAFE_SQUARES = (1e-24, 1e30)


class ItemIdError(ValueError):
    """Ids that cannot be item ids: wrong type, repeated, too long, or not of the collection's type."""


@dataclass(frozen=True, eq=False)
class ItemVectors:
    """One row per item, sorted by id; arguments may come unsorted.

    Args:
        ids: int64 or strings (numpy, Arrow or a sequence); kept as ``keys`` (see the module), given back by
            ``arrow_ids()``.
        vectors: float32 [n, d], raw rows or directions, in memory, memory-mapped, or :class:`Rows` that are computed
            when they are read; not copied if already sorted.
        norms: float32 [n], of the raw rows; computed where left out.
        evidence: bool [n], True if the item was touched in training; default: all True.
        counts: int64 [n], occurrences in training; None: unknown.
        statuses: uint8 [n]. FOUND, CARRIED, or UNCERTAIN for a vector from few training rows, of this version or
            carried. Default: all FOUND (a candidate does not carry anything by itself).
        carried_for: int32 [n], publications through which an item has been carried, 0 for a found one; None: not
            recorded.
        last_found: int32 [n], day on which it was last found, in days since 1970-01-01 UTC; None: not recorded.
        biases: float32 [n], what an item adds to the score of every user (see UserVectors); None: nothing.

    Raises:
        ItemIdError: repeated ids.
        ValueError: shapes that do not agree.
    """

    ids: Any
    vectors: Vectors
    norms: Array = None  # type: ignore[assignment]
    evidence: Array = None  # type: ignore[assignment]
    counts: Array | None = None
    statuses: Array = None  # type: ignore[assignment]
    carried_for: Array | None = None
    last_found: Array | None = None
    biases: Array | None = None

    def __post_init__(self) -> None:
        keys = keys_of(self.ids)
        vectors = self.vectors if isinstance(self.vectors, Rows) else np.asarray(self.vectors, dtype=np.float32)
        num_items = len(keys)
        if vectors.ndim != 2 or len(vectors) != num_items:
            raise ValueError(f"vectors have shape {vectors.shape}, expected [{num_items}, d] for {num_items} ids")
        if vectors.shape[1] < 1:
            raise ValueError("vectors have no coordinates")
        columns = {name: _column(name, getattr(self, name), dtype, num_items) for name, dtype in _COLUMNS.items()}
        if columns["norms"] is None:
            columns["norms"] = norms_of(vectors)
        if columns["evidence"] is None:
            columns["evidence"] = np.ones(num_items, dtype=np.bool_)
        if columns["statuses"] is None:
            columns["statuses"] = np.full(num_items, FOUND, dtype=np.uint8)
        if num_items > 1 and not bool(np.all(keys[1:] > keys[:-1])):
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            vectors = Picked(vectors, order) if isinstance(vectors, Rows) else vectors[order]
            columns = {name: None if column is None else column[order] for name, column in columns.items()}
            repeated = np.flatnonzero(keys[1:] == keys[:-1])
            if len(repeated):
                raise ItemIdError(
                    f"id {show_key(keys[repeated[0]])} occurs more than once ({len(repeated)} repetitions)"
                )
        for name, column in {"ids": keys, "vectors": vectors, **columns}.items():
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def keys(self) -> Array:
        """The sorted ids as int64 or fixed-width bytes."""
        return self.ids  # type: ignore[no-any-return]

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    @property
    def renewed(self) -> Array:
        """Flags of items with a vector of this version's training, bool [n]: found, or uncertain but not carried."""
        fresh: Array = self.statuses == FOUND
        uncertain = self.statuses == UNCERTAIN
        return fresh | uncertain if self.carried_for is None else fresh | (uncertain & (self.carried_for == 0))

    def take(self, rows: Array) -> ItemVectors:
        """Return the items at ``rows``, row numbers that must ascend; their vectors are not copied."""
        columns = ((name, getattr(self, name)) for name in _COLUMNS)
        picked: dict[str, Any] = {name: None if column is None else column[rows] for name, column in columns}
        return ItemVectors(self.keys[rows], Picked(self.vectors, rows), **picked)

    def arrow_ids(self) -> pa.Array:
        """Return ids as an Arrow array of int64 or string."""
        return arrow_of(self.keys)


_COLUMNS: dict[str, Any] = {
    "norms": np.float32, "evidence": np.bool_, "counts": np.int64, "statuses": np.uint8, "carried_for": np.int32,
    "last_found": np.int32, "biases": np.float32,
}  # fmt: skip


def _column(name: str, values: Any, dtype: Any, num_items: int) -> Array | None:
    if values is None:
        return None
    column = np.asarray(values, dtype=dtype)
    if column.shape != (num_items,):
        raise ValueError(f"{name} have shape {column.shape}, expected [{num_items}]")
    return column


# --- numbers ---------------------------------------------------------------------------------------------------------


def chunks(num_rows: int, chunk_rows: int = CHUNK_ROWS) -> Iterator[slice]:
    """Yield slices that cover ``range(num_rows)``."""
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, num_rows))


def unit_rows(rows: Array) -> tuple[Array, Array]:
    """Return (directions [n, d], norms [n]) of ``rows`` [n, d] in float64, without overflow or underflow.

    float64 rows are scaled by their largest coordinate before they are squared; squares of float32 values always fit
    float64. A zero row stays zero; a row that is not finite becomes NaN.
    """
    if np.asarray(rows).dtype == np.float32:
        directions = np.array(rows, dtype=np.float64)
        squares = np.einsum("nd,nd->n", directions, directions)
        norms = np.sqrt(squares)
        if bool(np.all(norms > 0)) and bool(np.isfinite(norms).all()):
            directions *= (1.0 / norms)[:, None]
            return directions, norms
    return _scaled_unit_rows(np.asarray(rows, dtype=np.float64))


def _scaled_unit_rows(rows: Array) -> tuple[Array, Array]:
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scale = np.max(np.abs(rows), axis=1, initial=0.0)
        finite = np.isfinite(scale)
        divisor = np.where(scale > 0, scale, 1.0)[:, None]
        scaled = rows / divisor
        length = np.sqrt(np.einsum("nd,nd->n", scaled, scaled))
        directions = scaled / np.where(length > 0, length, 1.0)[:, None]
        norms = scale * length
    directions[~finite] = np.nan
    norms[~finite] = np.nan
    return directions, norms


def squares_of(rows: Array) -> Array | None:
    """Return squared norms float32 [n] of float32 ``rows`` [n, d].

    Return None if rows are not float32, or if any row is zero, not finite, or so short or long that float32 squares
    would lose digits: then use ``unit_rows``.
    """
    if rows.dtype != np.float32:
        return None
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares: Array = np.einsum("nd,nd->n", rows, rows)
    low, high = _SAFE_SQUARES
    # NaN compares false.
    return squares if bool(np.all((squares > low) & (squares < high))) else None


def unit_float32(rows: Array) -> Array:
    """Return unit(rows) as float32 [n, d]; zero rows stay zero, rows that are not finite become NaN."""
    squares = squares_of(rows)
    if squares is None:
        return unit_rows(rows)[0].astype(np.float32)
    return rows * (1.0 / np.sqrt(squares))[:, None]


def row_norms(rows: Array) -> Array:
    """Return Euclidean norms float64 [n], of any scale; NaN for rows that are not finite."""
    squares = squares_of(rows)
    return unit_rows(rows)[1] if squares is None else np.sqrt(squares, dtype=np.float64)


def norms_of(vectors: Vectors) -> Array:
    """Return Euclidean norms [n] in float32; NaN for rows that are not finite.

    A norm that would overflow becomes the largest finite float32.
    """
    norms = np.empty(len(vectors), dtype=np.float32)
    largest = float(np.finfo(np.float32).max)
    for part in chunks(len(vectors)):
        norms[part] = np.minimum(row_norms(vectors[part]), largest)
    return norms


# --- ids -------------------------------------------------------------------------------------------------------------


def keys_of(ids: Any, *, query: bool = False) -> Array:
    """Return ids as keys, in the order given: int64 [n], or bytes ``S`` [n] for strings.

    Takes numpy arrays, Arrow arrays and sequences of int or of str (bool and float are refused), and keys themselves.
    With ``query`` (ids to look up) strings that no collection can hold (with a NUL, too long) become a key that is
    never found, instead of an error.

    Raises:
        ItemIdError: ids of another type or shape, beyond int64, or strings that no collection can hold.
    """
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind == "S":
            return ids
        if ids.ndim != 1:
            raise ItemIdError(f"ids have shape {ids.shape}, expected one dimension")
        if ids.dtype.kind == "i":
            return ids.astype(np.int64, copy=False)
        if ids.dtype.kind == "u":
            if ids.size and int(ids.max()) > np.iinfo(np.int64).max:
                raise ItemIdError("an id is beyond int64: use string ids")
            return ids.astype(np.int64)
        if ids.dtype.kind not in "UOT":
            raise ItemIdError(f"ids are {ids.dtype}: item ids are integers or strings")
        ids = ids.tolist()
    if isinstance(ids, (pa.Array, pa.ChunkedArray)):
        return _keys_of_arrow(ids, query)
    values = list(ids)
    if not values:
        return np.empty(0, dtype=np.int64)
    if all(type(value) is int for value in values):
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            raise ItemIdError("an id is beyond int64: use string ids") from None
    if all(isinstance(value, str) for value in values):
        try:
            return _keys_of_arrow(pa.array(values, pa.large_string()), query)
        except UnicodeEncodeError:
            raise ItemIdError("an id is not valid Unicode") from None
    if all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in values):
        return keys_of([int(value) for value in values])
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    raise ItemIdError(f"ids are of type {kinds}: item ids are all integers or all strings")


def _keys_of_arrow(ids: pa.Array | pa.ChunkedArray, query: bool) -> Array:
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
    if isinstance(ids, pa.ChunkedArray):
        ids = pa.concat_arrays(ids.chunks) if ids.num_chunks else pa.array([], ids.type)
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if ids.null_count:
        raise ItemIdError(f"{ids.null_count} ids are null")
    if pa.types.is_integer(ids.type):
        return keys_of(ids.to_numpy(zero_copy_only=False))
    if not (pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type) or pa.types.is_string_view(ids.type)):
        raise ItemIdError(f"ids are {ids.type}: item ids are integers or strings")
    return _fixed_width(ids.cast(pa.large_string()), query)


def impossible_ids(ids: pa.Array) -> pa.BooleanArray:
    """Flag strings that cannot be item ids: longer than MAX_ID_BYTES, or with a NUL character; nulls are no error."""
    long, nul = pc.greater(pc.binary_length(ids), MAX_ID_BYTES), pc.match_substring(ids, "\0")
    return pc.fill_null(pc.or_(long, nul), False)


def _fixed_width(ids: pa.Array, query: bool) -> Array:
    """Return strings as fixed-width bytes, padded with NUL, without a Python loop."""
    num_ids = len(ids)
    if not num_ids:
        return np.empty(0, dtype="S1")
    buffers = ids.buffers()
    offsets = np.frombuffer(buffers[1], dtype=np.int64)[ids.offset : ids.offset + num_ids + 1]
    data = np.frombuffer(buffers[2] if buffers[2] is not None else b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    if int(lengths.max()) > MAX_ID_BYTES or bool((data == 0).any()):
        if not query:
            raise ItemIdError(f"a string id is longer than {MAX_ID_BYTES} bytes or holds a NUL character")
        # 0xff never occurs in UTF-8, so this key matches nothing.
        keys = [
            b"\xff" if bad else value.encode()
            for value, bad in zip(ids.to_pylist(), impossible_ids(ids).to_pylist(), strict=True)
        ]
        return np.array(keys, dtype=np.bytes_)
    width = max(int(lengths.max()), 1)
    matrix = np.zeros((num_ids, width), dtype=np.uint8)
    matrix[np.arange(width) < lengths[:, None]] = data
    return matrix.reshape(-1).view(f"S{width}")


def arrow_of(keys: Array) -> pa.Array:
    """Return keys as an Arrow array of int64 or string, the form for users."""
    if keys.dtype.kind == "i":
        return pa.array(keys)
    return pa.array(keys.astype(object), pa.binary()).cast(pa.string())


def show_key(key: Any) -> str:
    """Return one key as text for messages to users."""
    return repr(key.decode("utf-8", "replace")) if isinstance(key, bytes) else str(key)


def find_rows(keys: Array, queries: Array) -> Array:
    """Return the row of each query in ``keys``, which must be sorted; int64 [len(queries)], -1 if absent."""
    if not len(keys) or not len(queries):
        return np.full(len(queries), -1, dtype=np.int64)
    if keys.dtype.kind != queries.dtype.kind:
        expected, given = ("integers", "strings") if keys.dtype.kind == "i" else ("strings", "integers")
        raise ItemIdError(f"the ids here are {expected}, those asked for are {given}")
    if queries.dtype.itemsize > keys.dtype.itemsize:
        # numpy would make all keys as wide as the longest query.
        fits = np.flatnonzero(np.char.str_len(queries) <= keys.dtype.itemsize)
        found = np.full(len(queries), -1, dtype=np.int64)
        found[fits] = find_rows(keys, queries[fits].astype(keys.dtype))
        return found
    rows = np.searchsorted(keys, queries)
    rows[rows == len(keys)] = 0
    return np.where(keys[rows] == queries, rows, -1)


def shared_rows(left: Array, right: Array) -> tuple[Array, Array]:
    """Return (rows in left, rows in right) of the ids that two sorted key arrays share, in the order of the ids."""
    if left.dtype == right.dtype and np.array_equal(left, right):
        same = np.arange(len(left))
        return same, same
    rows = find_rows(right, left)
    present = np.flatnonzero(rows >= 0)
    return present, rows[present]


def as_list(values: Sequence[Any] | Array) -> list[Any]:
    """Return plain Python ids of keys, for JSON."""
    return arrow_of(np.asarray(values)).to_pylist()
