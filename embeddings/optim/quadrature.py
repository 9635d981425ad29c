"""Gauss quadrature from moments: a few nodes in place of many terms of a sum with positive weights. Numpy only.

A rule of n nodes has the first 2 n moments of the sum, so it gives sum_i w_i f(y_i) for polynomials f up to degree
2 n - 1 exactly. Chebyshev's algorithm turns moments into the recurrence of their orthogonal polynomials, whose Jacobi
matrix has the nodes for eigenvalues (Golub and Welsch 1969; Gautschi, *Orthogonal Polynomials*, 2004, section 2.1.7).
"""

from __future__ import annotations

import numpy as np

# A squared distance between nodes below this part of the squared mean is what rounding left: there are fewer points
# than nodes.
_NOTHING = 1e-13


def moments(weights: np.ndarray, points: np.ndarray, count: int) -> np.ndarray:
    """Return sum_i w_i y_i^p over the last axis for p < ``count``, float64 [count, ...]."""
    sums, terms = np.empty((count, *weights.shape[:-1])), weights
    for power in range(count):
        terms = terms * points if power else weights
        sums[power] = terms.sum(axis=-1)
    return sums


def gauss_rule(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and nodes of the rules that have the moments ``sums``, float64 [2 n, m], n >= 2: each [m, n].

    The points have to lie on one side of 0. Where a sum has fewer than n points, further nodes have no weight.
    """
    total = np.maximum(sums[0], 0.0)
    one = np.where(total > 0.0, total, 1.0)
    mean = np.where(total > 0.0, sums[1] / one, 0.0)
    # In units of the mean, so that high powers neither vanish nor overflow.
    scale = np.where(mean != 0.0, mean, 1.0)
    scaled, unit = np.empty_like(sums), one
    for power, each in enumerate(sums):
        np.divide(each, unit, out=scaled[power])
        unit = unit * scale
    diagonal, beside = _jacobi(scaled)
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
    return (total * shares).T, (scale * nodes).T


def _jacobi(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the diagonal [n, m] and the squares beside it [n - 1, m], by Chebyshev's algorithm."""
    count = len(sums) // 2
    diagonal, beside = np.empty((count, sums.shape[1])), np.zeros((count - 1, sums.shape[1]))
    diagonal[0] = sums[1]
    before, row = np.zeros((len(sums) + 2, sums.shape[1])), sums
    row[0] = 1.0
    square = np.zeros(sums.shape[1])
    for k in range(1, count):
        following = row[2:] - diagonal[k - 1] * row[1:-1] - square * before[2:-2]
        square = following[0] / row[0]
        there = square > _NOTHING
        square = np.where(there, square, 0.0)
        lead = np.where(there, following[0], 1.0)
        diagonal[k] = np.where(there, following[1] / lead - row[1] / row[0], diagonal[k - 1])
        beside[k - 1] = square
        before, row = row, np.where(there, following, 0.0)
        row[0] = lead
    return diagonal, beside
