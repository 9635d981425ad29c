"""Exact evaluation metrics over a whole split, in float64 numpy: of logits against labels, and of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def auc(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """Area under the ROC curve: P(score of a positive > score of a negative) + P(equal) / 2.

    Rank-based (Mann-Whitney) with mid-ranks for ties, so it is exact and independent of the order of the rows.
    ``scores`` and ``labels`` (0 or 1) are [n]. NaN where only one class is present, or a score is NaN.
    """
    scores = np.asarray(scores, np.float64)
    positive = np.asarray(labels) > 0.5
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if num_positive == 0 or num_negative == 0 or np.isnan(scores).any():
        return float("nan")
    # Rows of one score form a block [start, end) of the order; each of them takes the block's mean rank.
    distinct, block = np.unique(scores, return_inverse=True)
    size = np.bincount(block, minlength=distinct.size)
    end = np.cumsum(size)
    twice_mid_rank = 2 * end - size + 1
    # Twice the rank sum is an integer: no rounding however many rows there are.
    twice_rank_sum = int(twice_mid_rank[block[positive]].sum())
    return (twice_rank_sum - num_positive * (num_positive + 1)) / (2.0 * num_positive * num_negative)


def logloss(logits: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """Mean binary cross-entropy of [n] logits against [n] labels in [0, 1]: log(1 + e^z) - y z. NaN if empty."""
    logits = np.asarray(logits, np.float64)
    if logits.size == 0:
        return float("nan")
    return float(np.mean(np.logaddexp(0.0, logits) - np.asarray(labels, np.float64) * logits))


def rank_of(target: Any, others: Any) -> Any:
    """How many of ``others`` [b, n] score at least as high as ``target`` [b]: its rank from 0, ties against it,
    so that a model that scores all alike finds nothing. Arrays or tensors; a NaN target is last."""
    return others.shape[1] - (others < target[:, None]).sum(1)


def hit_rate(ranks: NDArray[np.floating], k: int) -> float:
    """Share of targets among the first k, ranks [n] from 0. NaN if empty or unknown."""
    ranks = np.asarray(ranks, np.float64)
    return float(np.mean(ranks < k)) if ranks.size and not np.isnan(ranks).any() else float("nan")


def ndcg(ranks: NDArray[np.floating], k: int) -> float:
    """Mean of 1 / log2(rank + 2) for ranks [n] from 0 below k, else 0: NDCG@k with one relevant item. NaN if empty or
    unknown."""
    ranks = np.asarray(ranks, np.float64)
    if not ranks.size or np.isnan(ranks).any():
        return float("nan")
    return float(np.mean(np.where(ranks < k, 1.0 / np.log2(ranks + 2.0), 0.0)))
