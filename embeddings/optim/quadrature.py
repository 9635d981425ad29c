"""Gauss quadrature from moments: a few nodes instead of many terms of a sum with positive weights. Numpy only.

A rule of n nodes has the first 2 n moments of the sum, so it gives sum_i w_i f(y_i) for polynomials f up to degree
2 n - 1 exactly. Moments are taken of polynomials that are orthogonal for a similar sum: for ten nodes and more, moments
of plain powers lose all accuracy in float64. The modified Chebyshev algorithm turns them into the recurrence of the
sum's own orthogonal polynomials. The eigenvalues of their Jacobi matrix are the nodes (Golub and Welsch 1969; Gautschi,
*Orthogonal Polynomials*, 2004, sections 2.1.7, 2.2.3 and 2.1.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# A squared distance between nodes below this share of the squared unit is a rounding error: the sum has fewer points
# than nodes.
_NOTHING = 1e-13
# Weights below this share of the total are dropped: polynomials may overflow at their points.
NO_WEIGHT = 1e-50


class Basis(NamedTuple):
    """Monic polynomials of x = y / ``unit``: p_{k + 1} = (x - means[k]) p_k - squares[k] p_{k - 1}."""

    unit: float
    means: np.ndarray
    squares: np.ndarray

    def powers(self) -> Basis:
        """Return the basis of plain powers 1, x, x^2, ... with the same unit."""
        return Basis(self.unit, np.zeros_like(self.means), np.zeros_like(self.squares))


def orthogonal_basis(weights: np.ndarray, points: np.ndarray, count: int) -> Basis:
    """Return ``count`` polynomials that are orthogonal for the sum of ``weights`` at ``points``, both [m].

    The unit is the sum's standard deviation. Polynomials beyond the number of points are arbitrary.
    """
    kept = weights > NO_WEIGHT * weights.sum()
    weights, points = weights[kept], points[kept]
    total = weights.sum()
    mean = (weights @ points) / total
    unit = float(np.sqrt(weights @ (points - mean) ** 2 / total)) or 1.0
    x = points / unit
    means, squares = np.full(count, mean / unit), np.zeros(count)
    before, here, norm = np.zeros_like(x), np.ones_like(x), total
    for k in range(min(count, len(points))):
        if k:
            norm_before, norm = norm, weights @ here**2
            if norm <= _NOTHING * norm_before:
                break
            means[k], squares[k] = (weights * x) @ here**2 / norm, norm / norm_before
        before, here = here, (x - means[k]) * here - squares[k] * before
    return Basis(unit, means, squares)


def polynomials(points: np.ndarray, basis: Basis, count: int) -> Iterator[np.ndarray]:
    """Yield the values p_k(``points``) for k = 0 .. ``count`` - 1."""
    x = points / basis.unit
    before, here = np.zeros_like(x), np.ones_like(x)
    for k in range(count):
        yield here
        before, here = here, (x - basis.means[k]) * here - basis.squares[k] * before


def moments(weights: np.ndarray, points: np.ndarray, basis: Basis, count: int) -> np.ndarray:
    """Return sum_i w_i p_k(y_i) over the last axis for k < ``count``, float64 [count, ...]."""
    return np.stack([(weights * each).sum(axis=-1) for each in polynomials(points, basis, count)])


def gauss_rule(sums: np.ndarray, basis: Basis) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and nodes of the rules that have the moments ``sums``, float64 [2 n, m], n >= 2: each [m, n].

    If a sum has fewer than n points, the surplus nodes have weight 0.
    """
    total = np.maximum(sums[0], 0.0)
    scaled = sums / np.where(total > 0.0, total, 1.0)
    scaled[0] = 1.0
    diagonal, beside = _jacobi(scaled, basis)
    if len(diagonal) == 2:
        (first, last), (gap,) = diagonal, beside
        half, middle = (last - first) / 2.0, (first + last) / 2.0
        distance = np.sqrt(half**2 + gap)
        nodes = np.stack([middle - distance, middle + distance])
        share = np.where(distance > 0.0, (distance + half) / np.where(distance > 0.0, 2.0 * distance, 1.0), 0.5)
        shares = np.stack([share, 1.0 - share])
    else:
        count = len(diagonal)
        matrices = np.zeros((sums.shape[1], count, count))
        at = np.arange(count)
        matrices[:, at, at] = diagonal.T
        matrices[:, at[1:], at[:-1]] = np.sqrt(beside).T
        values, vectors = np.linalg.eigh(matrices)
        nodes, shares = values.T, (vectors[:, 0, :] ** 2).T
    return (total * shares).T, (basis.unit * nodes).T


def _jacobi(sums: np.ndarray, basis: Basis) -> tuple[np.ndarray, np.ndarray]:
    """Return the Jacobi matrices' diagonals [n, m] and squared off-diagonals [n - 1, m] (modified Chebyshev)."""
    count = len(sums) // 2
    means, squares = basis.means[:, None], basis.squares[:, None]
    diagonal, beside = np.empty((count, sums.shape[1])), np.zeros((count - 1, sums.shape[1]))
    diagonal[0] = means[0] + sums[1]
    # Row k holds entries from k on: each row before begins one earlier and ends one later.
    before, row, square = np.zeros((len(sums) + 2, sums.shape[1])), sums, np.zeros(sums.shape[1])
    for k in range(1, count):
        of = slice(k, 2 * count - k)
        following = row[2:] - (diagonal[k - 1] - means[of]) * row[1:-1] - square * before[2:-2] + squares[of] * row[:-2]
        square = following[0] / row[0]
        there = square > _NOTHING
        square = np.where(there, square, 0.0)
        lead = np.where(there, following[0], 1.0)
        diagonal[k] = np.where(there, means[k] + following[1] / lead - row[1] / row[0], diagonal[k - 1])
        beside[k - 1] = square
        before, row = row, np.where(there, following, 0.0)
        row[0] = lead
    return diagonal, beside
