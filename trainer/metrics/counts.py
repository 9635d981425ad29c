"""Rows of a split with 0/1 labels, counted by score. AUC, logloss and calibration need only these counts.

Counts of parts of a split add up, so that the same figures come out of one array, of pieces in ascending order
(:mod:`trainer.metrics.streaming`), and of rows with multiplicities (:mod:`trainer.metrics.intervals`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


class Counts(NamedTuple):
    """Numbers of rows by score.

    ``scores``: float64 [m], distinct and ascending. ``totals``, ``positives``: int64 [m], numbers of rows, and of rows
    with label 1, that have each score.
    """

    scores: Float64s
    totals: Int64s
    positives: Int64s

    @property
    def num_rows(self) -> int:
        return int(self.totals.sum())

    @property
    def num_positives(self) -> int:
        return int(self.positives.sum())


class Blocks:
    """[n] scores, none NaN, and [n] labels (0 or 1), sorted by score once and then counted with any multiplicities."""

    def __init__(self, scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]):
        self._positive = np.asarray(labels) > 0.5
        self._distinct, self._block = np.unique(np.asarray(scores, np.float64), return_inverse=True)

    def counts(self, weights: Int64s | None = None) -> Counts:
        """Count the rows; ``weights``: how many times each row counts, whole numbers [n]; None: once."""
        size, own = self._distinct.size, self._block[self._positive]
        if weights is None:
            return Counts(self._distinct, np.bincount(self._block, minlength=size), np.bincount(own, minlength=size))
        # Sums of whole numbers: exact in float64 below 2^53.
        totals = np.bincount(self._block, weights, size).astype(np.int64)
        return Counts(
            self._distinct, totals, np.bincount(own, np.asarray(weights)[self._positive], size).astype(np.int64)
        )


def by_score(
    scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], weights: Int64s | None = None
) -> Counts:
    """Count rows by score: [n] scores, none NaN, [n] labels (0 or 1), and whole multiplicities [n] or None (1 each)."""
    return Blocks(scores, labels).counts(weights)


def any_nan(scores: npt.NDArray[np.floating]) -> bool:
    return bool(np.isnan(scores).any())
