"""Rotation of a refreshed table of item vectors onto the version that consumers already know.

Two trainings of the same model give the same geometry in another basis (any rotation or reflection of both towers
leaves every score unchanged). Orthogonal Procrustes (Schoenemann 1966) finds the basis change from the items both
versions share.
"""

from __future__ import annotations

import numpy as np

from embeddings.vectors.item_vectors import chunks, squares_of, unit_float32, unit_rows
from embeddings.vectors.lazy_rows import CHUNK_ROWS, Array, Rows, Vectors, take

MIN_SHARED_PER_DIM = 12


class TooFewShared(ValueError):
    """Fewer shared items than a trustworthy rotation needs."""


def min_shared(dim: int) -> int:
    """Return the fewest shared items for an alignment of ``dim`` coordinates: 12 per coordinate."""
    return MIN_SHARED_PER_DIM * dim


def procrustes(
    source: Vectors,
    target: Vectors,
    *,
    source_rows: Array | None = None,
    target_rows: Array | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Array:
    """Return the orthogonal R [d, d], float64, that minimises sum_i |unit(source_i) R - unit(target_i)|^2.

    With the singular value decomposition U S V^T of sum_i unit(source_i)^T unit(target_i), R = U V^T. Rows may have any
    norm; sums are kept in float64. Pairs with a zero row do not count.

    Args:
        source: [n, d]; may be memory-mapped.
        target: [n, d], row i is the same item as row i of ``source``.
        source_rows: int [n], indices into a larger ``source``: pair i has row ``source_rows[i]``.
        target_rows: int [n], likewise for ``target``.
        chunk_rows: number of rows that are read at a time.

    Raises:
        TooFewShared: there are fewer than 12 d pairs.
        ValueError: shapes that differ, or rows that are not finite.

    Example:
        >>> import numpy as np
        >>> from embeddings.refresh.procrustes import procrustes
        >>> known = np.random.default_rng(0).standard_normal((100, 3))
        >>> turned = known[:, [1, 2, 0]]  # the same geometry in another basis
        >>> bool(np.allclose(turned @ procrustes(turned, known), known))
        True
    """
    if source.ndim != 2 or target.ndim != 2 or source.shape[1] != target.shape[1]:
        raise ValueError(f"source has shape {source.shape} and target {target.shape}: expected [n, d] of one d")
    num_source = len(source) if source_rows is None else len(source_rows)
    num_target = len(target) if target_rows is None else len(target_rows)
    if num_source != num_target:
        raise ValueError(f"{num_source} source rows against {num_target} target rows: they are paired by position")
    dim = source.shape[1]
    product = np.zeros((dim, dim))
    num_pairs = 0
    for part in chunks(num_source, chunk_rows):
        left = source[part] if source_rows is None else take(source, source_rows[part])
        right = target[part] if target_rows is None else take(target, target_rows[part])
        block, num_directions = _product(left, right)
        product += block
        num_pairs += num_directions
    if num_pairs < min_shared(dim):
        raise TooFewShared(
            f"{num_pairs} shared items, {min_shared(dim)} are needed to align {dim} coordinates "
            f"({MIN_SHARED_PER_DIM} for each): start a new anchor generation"
        )
    left_basis, _, right_basis = np.linalg.svd(product)
    return left_basis @ right_basis


def _product(left: Array, right: Array) -> tuple[Array, int]:
    """Return (sum of unit(left_i)^T unit(right_i) [d, d], number of pairs without a zero row) for one chunk.

    A float32 chunk is multiplied in float32; the caller adds up chunks in float64.
    """
    left_squares, right_squares = squares_of(left), squares_of(right)
    if left_squares is not None and right_squares is not None:
        weights = 1.0 / np.sqrt(left_squares.astype(np.float64) * right_squares)
        return (left * weights.astype(np.float32)[:, None]).T @ right, len(left)
    (left, left_norms), (right, right_norms) = unit_rows(left), unit_rows(right)
    if not (np.isfinite(left_norms).all() and np.isfinite(right_norms).all()):
        raise ValueError("a row is not finite: leave rows without a direction out of the alignment")
    return left.T @ right, int(np.count_nonzero((left_norms > 0) & (right_norms > 0)))


def turn_rows(rows: Array, rotation: Array | None) -> Array:
    """Return the rows of one chunk rotated, [n, d], with arbitrary norms.

    If float32 can hold the squares of float32 rows, this is ``rows`` R in float32. Else it is unit(rows) R in float64,
    in which zero rows stay zero and rows that are not finite become NaN. Without a rotation it is unit(rows).
    """
    if rotation is not None and squares_of(rows) is not None:
        return rows @ rotation.astype(np.float32)
    directions, _ = unit_rows(rows)
    return directions if rotation is None else directions @ rotation


class Rotated(Rows):
    """Rows unit(vectors) R, float32, computed when they are read; without a rotation just the directions.

    Zero rows stay zero, rows that are not finite become NaN.
    """

    def __init__(self, vectors: Vectors, rotation: Array | None):
        super().__init__(*vectors.shape)
        self._vectors = vectors
        self._rotation = rotation

    def read(self, rows: slice | Array) -> Array:
        given = self._vectors[rows] if isinstance(rows, slice) else take(self._vectors, rows)
        return unit_float32(turn_rows(given, self._rotation))


class Turned(Rows):
    """Rows vectors R of unchanged norm, computed in float64 when they are read."""

    def __init__(self, vectors: Vectors, rotation: Array):
        super().__init__(*vectors.shape)
        self._vectors = vectors
        self._rotation = rotation

    def read(self, rows: slice | Array) -> Array:
        turned: Array = np.asarray(self._vectors[rows], np.float64) @ self._rotation
        return turned.astype(np.float32)


def rotate(vectors: Vectors, rotation: Array | None) -> Array:
    """Return unit(vectors) R as float32 [n, d], all of it in memory, computed by chunks (see :class:`Rotated`)."""
    return np.asarray(Rotated(vectors, rotation))
