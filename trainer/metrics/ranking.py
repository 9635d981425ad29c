"""Metrics of ranks: the places of the items that a user took among those that could have been shown.

Ranks count from 0. A user may have taken several items (:class:`Ranking`, one figure for each user and their mean over
users), or each held-out item is a ranking of its own, as in leave-one-out protocols.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.metrics.counts import Float64s, Int64s


def rank_of(target: Any, others: Any) -> Any:
    """Count the ``others`` [b, n] that score at least as high as ``target`` [b]: its rank from 0.

    Ties are against the target, so that a model that scores all alike finds nothing. Arrays or tensors; a NaN target is
    last.
    """
    return others.shape[1] - (others < target[:, None]).sum(1)


class Ranking(NamedTuple):
    """Ranks of the relevant items of u users.

    Attributes:
        ranks: [m], of those relevant items that were ranked; a user's own are distinct. NaN: unknown.
        users: [m], the user of each, in [0, u).
        num_relevant: [u], at least 1. More than there are ranks where some could not be ranked, which counts as not
            found.
    """

    ranks: Float64s
    users: Int64s
    num_relevant: Int64s

    @staticmethod
    def of_single(ranks: npt.NDArray[np.floating]) -> Ranking:
        """Make each rank a ranking with one relevant item."""
        count = len(ranks)
        return Ranking(np.asarray(ranks, np.float64), np.arange(count), np.ones(count, np.int64))

    def _sums(self, gains: npt.NDArray[Any]) -> Float64s:
        sums: Float64s = np.bincount(self.users, gains, len(self.num_relevant)).astype(np.float64)
        return sums

    def precision(self, k: int) -> Float64s:
        """Return [u]: relevant items among the first k, divided by k, also where fewer than k are relevant."""
        return self._sums(self.ranks < k) / k

    def recall(self, k: int) -> Float64s:
        """Return [u]: relevant items among the first k, divided by all relevant ones."""
        return self._sums(self.ranks < k) / self.num_relevant

    def hit_rate(self, k: int) -> Float64s:
        """Return [u]: 1 where a relevant item is among the first k, else 0."""
        return (self._sums(self.ranks < k) > 0).astype(np.float64)

    def ndcg(self, k: int) -> Float64s:
        """Return [u]: DCG / ideal DCG, gain 1 and discount 1 / log2(rank + 2) below k.

        The ideal has min(k, relevant) relevant items first (Järvelin and Kekäläinen, ACM TOIS 2002).
        """
        discounts = 1.0 / np.log2(np.arange(k) + 2.0)
        ideal = np.concatenate([[0.0], np.cumsum(discounts)])[np.minimum(self.num_relevant, k)]
        return self._sums(np.where(self.ranks < k, 1.0 / np.log2(self.ranks + 2.0), 0.0)) / ideal

    def mrr(self) -> Float64s:
        """Return [u]: 1 / (rank + 1) of the first relevant item, 0 where none was ranked."""
        first = np.full(len(self.num_relevant), np.inf)
        np.minimum.at(first, self.users, self.ranks)
        return 1.0 / (first + 1.0)

    def values(self, metric: str, k: int | None) -> Float64s:
        """Return [u] of ``precision``, ``recall``, ``hit_rate``, ``ndcg`` at k, or ``mrr``.

        NaN throughout where a rank is unknown.
        """
        if np.isnan(self.ranks).any():
            return np.full(len(self.num_relevant), np.nan)
        figures: Float64s = getattr(self, metric)(*(() if k is None else (k,)))
        return figures
