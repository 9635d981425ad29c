"""The highest scores of each row of a matrix. Torch-free."""

from __future__ import annotations

import numpy as np

from embeddings.vectors.lazy_rows import Array


def top_k(scores: Array, k: int) -> Array:
    """Return the columns of the k highest scores of each row of ``scores`` [n, m], int64 [n, min(k, m)], best first.

    Of equal scores the earlier column comes first, unless it falls to the cut after k.
    """
    if scores.shape[1] <= k:
        return np.argsort(-scores, axis=1, kind="stable")
    best = np.sort(np.argpartition(-scores, k - 1, axis=1)[:, :k], axis=1)
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
    return np.take_along_axis(best, order, 1)


class BestSoFar:
    """The k highest scores of n queries, from pieces of the columns added one after another.

    Attributes:
        columns: int64 [n, at most k], best first.
        scores: float32 [n, at most k]; -inf marks a column that is no answer.
    """

    def __init__(self, num_queries: int, k: int):
        self._k = k
        self.columns: Array = np.empty((num_queries, 0), dtype=np.int64)
        self.scores: Array = np.empty((num_queries, 0), dtype=np.float32)

    def add(self, first_column: int, scores: Array) -> None:
        """Add the scores [n, m] of the columns from ``first_column`` on."""
        best = top_k(scores, self._k)
        both = np.concatenate([self.scores, np.take_along_axis(scores, best, 1)], axis=1)
        columns = np.concatenate([self.columns, best + first_column], axis=1)
        again = top_k(both, self._k)
        self.scores, self.columns = np.take_along_axis(both, again, 1), np.take_along_axis(columns, again, 1)
