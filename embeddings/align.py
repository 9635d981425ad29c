"""Rotation of a refreshed table of item vectors onto the version that consumers already know.

Two trainings of the same model give the same geometry in another basis (any rotation or reflection of both towers
leaves every score unchanged). Orthogonal Procrustes (Schoenemann 1966) finds the basis change from the items both
versions share.
"""

from __future__ import annotations

import numpy as np

from embeddings.vectors import CHUNK_ROWS, Array, chunks, unit_rows

MIN_SHARED_PER_DIM = 12


class TooFewShared(ValueError):
    """Fewer shared items than the rotation has to be trusted with."""


def min_shared(dim: int) -> int:
    """Shared items below which an alignment of ``dim`` coordinates is refused: 12 per coordinate."""
    return MIN_SHARED_PER_DIM * dim


def procrustes(
    source: Array,
    target: Array,
    *,
    source_rows: Array | None = None,
    target_rows: Array | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Array:
    """Orthogonal R [d, d], float64, that minimises sum_i |unit(source_i) R - unit(target_i)|^2: with the singular value
    decomposition U S V^T of sum_i unit(source_i)^T unit(target_i), R = U V^T.

    source, target: [n, d], row i of one is the same item as row i of the other; with ``source_rows`` and
    ``target_rows`` (int [n] each) the pairs are picked from larger arrays, which may be memory-mapped: rows are read
    ``chunk_rows`` at a time. Directions are taken in float64 with scaling. Zero rows do not count. Raises TooFewShared
    under 12 d pairs, ValueError for shapes that differ or rows that are not finite.
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
        left, left_norms = unit_rows(source[part] if source_rows is None else source[source_rows[part]])
        right, right_norms = unit_rows(target[part] if target_rows is None else target[target_rows[part]])
        if not (np.isfinite(left_norms).all() and np.isfinite(right_norms).all()):
            raise ValueError("a row is not finite: leave rows without a direction out of the alignment")
        product += left.T @ right
        num_pairs += int(np.count_nonzero((left_norms > 0) & (right_norms > 0)))
    if num_pairs < min_shared(dim):
        raise TooFewShared(
            f"{num_pairs} shared items, {min_shared(dim)} are needed to align {dim} coordinates "
            f"({MIN_SHARED_PER_DIM} for each): start a new anchor generation"
        )
    left_basis, _, right_basis = np.linalg.svd(product)
    return left_basis @ right_basis


def rotate(vectors: Array, rotation: Array | None) -> Array:
    """unit(vectors) R as float32 [n, d], computed in float64 by chunks; without a rotation the directions alone.
    Zero rows stay zero, rows that are not finite become NaN."""
    rotated = np.empty(vectors.shape, dtype=np.float32)
    for part in chunks(len(vectors)):
        directions, _ = unit_rows(vectors[part])
        rotated[part] = directions if rotation is None else directions @ rotation
    return rotated
