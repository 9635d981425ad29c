"""Kernel-target alignment and the Nadaraya-Watson estimator: measures of what vectors tell about a label.

Xu et al., "Some Practical Concerns and Solutions for Using Pretrained Representation in Industrial Systems", sections
4.3 and 5; Nadaraya 1964. Neither needs a trained consumer. Both figures depend only on inner products of directions, so
a rotation changes neither. The figures are for a version's report; the gate sets no limit on them.
"""

from __future__ import annotations

import numpy as np

from embeddings.rff import DEFAULT_SIGMA
from embeddings.vectors.item_vectors import Array, unit_rows

MAX_PAIRED = 1_000
"""Largest number of items in a kernel matrix; of more items an evenly spaced sample is used."""
SIGMAS = (DEFAULT_SIGMA, 1.0, 2.0, 4.0, 8.0)


def kernel(left: Array, right: Array, sigma: float) -> Array:
    """Return K(h, h') = exp(-sigma^2 |h - h'|^2 / 2) of unit rows [n, d] and [m, d]: [n, m]."""
    return np.exp(sigma**2 * (left @ right.T - 1.0))


def kernel_alignment(vectors: Array, classes: Array, sigma: float = DEFAULT_SIGMA) -> tuple[float, float]:
    """Return (A, lift) of vectors [n, d], read as directions, and classes int [n].

    A = 1 / (n (n - 1)) sum_{i != j} 1[y_i = y_j] K(h_i, h_j) is the alignment of Xu et al., in which frequent classes
    weigh most. lift = (mean K of pairs of one class) / (mean K of all pairs) is 1 if the vectors do not depend on the
    class. Both are NaN without two items of one class.
    """
    rows = unit_rows(vectors)[0]
    others = ~np.eye(len(rows), dtype=bool)
    same = (classes[:, None] == classes[None, :]) & others
    if not same.any():
        return float("nan"), float("nan")
    products = kernel(rows, rows, sigma)
    aligned = float((products * same).sum() / others.sum())
    return aligned, float(products[same].mean() / products[others].mean())


def nadaraya_watson(
    known: Array, known_classes: Array, asked: Array, num_classes: int, sigmas: tuple[float, ...] = SIGMAS
) -> Array:
    """Return the predicted classes int [m] of ``asked`` [m, d].

    The class is argmax_c sum_j 1[y_j = c] K(h, h_j) over the rows of ``known`` [n, d]. Sigma is the one of ``sigmas``
    that predicts the known classes best, each from the other known rows; the first one wins a tie.
    """
    known, asked = unit_rows(known)[0], unit_rows(asked)[0]
    votes = np.eye(num_classes)[known_classes]
    best, best_right = sigmas[0], -1.0
    for sigma in sigmas:
        weights = kernel(known, known, sigma)
        np.fill_diagonal(weights, 0.0)
        right = float(((weights @ votes).argmax(axis=1) == known_classes).mean())
        if right > best_right:
            best, best_right = sigma, right
    return (kernel(asked, known, best) @ votes).argmax(axis=1)


def diagnostics(vectors: Array, classes: Array, held_out: Array, num_classes: int) -> dict[str, float]:
    """Return ``alignment`` and ``alignment_lift`` of all items, and ``nw_accuracy`` on ``held_out`` items (bool [n]).

    Held-out items are predicted from the others. Each figure is computed from at most MAX_PAIRED items, and is NaN if
    there are none.
    """
    some = _spread(np.arange(len(vectors)))
    aligned, lift = kernel_alignment(vectors[some], classes[some])
    figures = {"alignment": aligned, "alignment_lift": lift, "nw_accuracy": float("nan")}
    if held_out.any() and not held_out.all():
        known, asked = _spread(np.flatnonzero(~held_out)), _spread(np.flatnonzero(held_out))
        answers = nadaraya_watson(vectors[known], classes[known], vectors[asked], num_classes)
        figures["nw_accuracy"] = float((answers == classes[asked]).mean())
    return figures


def _spread(rows: Array) -> Array:
    """Return at most MAX_PAIRED of the row numbers ``rows``, at even distances."""
    if len(rows) <= MAX_PAIRED:
        return rows
    return rows[np.linspace(0, len(rows) - 1, MAX_PAIRED).astype(np.int64)]
