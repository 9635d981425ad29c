"""Ranking metrics, from the ranks of relevant items (the user's held-out positives) among the candidate items.

Ranks count from 0. A user may have several relevant items (:class:`Ranking`: a figure for each user, then the mean over
users), or each held-out item is a ranking of its own, as in leave-one-out protocols.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.metrics.counts import Float64s, Int64s


def rank_of(target: Any, others: Any) -> Any:
    """Return the rank of each ``target`` [b] from 0: the number of ``others`` [b, n] in its row that are not lower.

    A tie counts against the target, so that a model that scores all items alike finds none. The arguments are scores,
    as arrays or tensors; a NaN target ranks last.
    """
    return others.shape[1] - (others < target[:, None]).sum(1)


class Ranking(NamedTuple):
    """Ranks of the relevant items of u users.

    Attributes:
        ranks: [m], ranks of the relevant items that were ranked, distinct for each user. NaN: unknown.
        users: [m], the user of each rank, in [0, u).
        num_relevant: [u], number of relevant items of each user, at least 1. The number includes relevant items that
            could not be ranked, which count as not found.
    """

    ranks: Float64s
    users: Int64s
    num_relevant: Int64s

    @staticmethod
    def of_single(ranks: npt.NDArray[np.floating]) -> Ranking:
        """Return the rankings of [n] users with one relevant item each, from the ranks of these items [n]."""
        count = len(ranks)
        return Ranking(np.asarray(ranks, np.float64), np.arange(count), np.ones(count, np.int64))

    def _sums(self, gains: npt.NDArray[Any]) -> Float64s:
        sums: Float64s = np.bincount(self.users, gains, len(self.num_relevant)).astype(np.float64)
        return sums

    def precision(self, k: int) -> Float64s:
        """Return for each user [u] the number of relevant items among the first k, divided by k."""
        return self._sums(self.ranks < k) / k

    def recall(self, k: int) -> Float64s:
        """Return for each user [u] the share of the relevant items that are among the first k."""
        return self._sums(self.ranks < k) / self.num_relevant

    def hit_rate(self, k: int) -> Float64s:
        """Return for each user [u] 1 if a relevant item is among the first k, else 0."""
        return (self._sums(self.ranks < k) > 0).astype(np.float64)

    def ndcg(self, k: int) -> Float64s:
        """Return for each user [u] DCG / ideal DCG, with gain 1 and discount 1 / log2(rank + 2) for ranks below k.

        The ideal ranking begins with min(k, num_relevant) relevant items (Järvelin and Kekäläinen, ACM TOIS 2002).
        """
        discounts = 1.0 / np.log2(np.arange(k) + 2.0)
        ideal = np.concatenate([[0.0], np.cumsum(discounts)])[np.minimum(self.num_relevant, k)]
        return self._sums(np.where(self.ranks < k, 1.0 / np.log2(self.ranks + 2.0), 0.0)) / ideal

    def mrr(self) -> Float64s:
        """Return for each user [u] 1 / (rank + 1) of the first relevant item, 0 if none was ranked."""
        first = np.full(len(self.num_relevant), np.inf)
        np.minimum.at(first, self.users, self.ranks)
        return 1.0 / (first + 1.0)

    def values(self, metric: str, k: int | None) -> Float64s:
        """Return for each user [u] the metric ``precision``, ``recall``, ``hit_rate`` or ``ndcg`` at k, or ``mrr``.

        If any rank is NaN, all values are NaN.
        """
        if np.isnan(self.ranks).any():
            return np.full(len(self.num_relevant), np.nan)
        figures: Float64s = getattr(self, metric)(*(() if k is None else (k,)))
        return figures
