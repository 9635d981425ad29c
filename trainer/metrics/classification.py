"""Metrics of logits against 0/1 labels, exact over a whole split, in float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.metrics.counts import Counts, Float64s, Int64s, any_nan, by_score

NAN = float("nan")


def auc(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], weights: Int64s | None = None) -> float:
    """Return the area under the ROC curve: P(score of a positive > score of a negative) + P(equal) / 2.

    Rank-based (Mann-Whitney) with mid-ranks for ties, so it is exact and independent of the order of the rows.
    ``scores`` and ``labels`` (0 or 1) are [n], ``weights`` whole multiplicities [n]. NaN where only one class is
    present, or a score is NaN.
    """
    return NAN if any_nan(np.asarray(scores)) else AucSum().add(by_score(scores, labels, weights)).value()


class AucSum:
    """Running sums for :func:`auc`, to which rows are added in pieces of ascending score.

    The sums are integers, so nothing is rounded, however many rows there are.
    """

    def __init__(self) -> None:
        self.num_rows = self.num_positives = self._twice_rank_sum = 0

    def add(self, counts: Counts) -> AucSum:
        """Add the rows in ``counts``; their scores must be above all scores that were added before."""
        # Rows of one score share the mean of their ranks, which is a half at most.
        end = self.num_rows + np.cumsum(counts.totals)
        twice_mid_rank = 2 * end - counts.totals + 1
        self._twice_rank_sum += int((twice_mid_rank * counts.positives).sum())
        self.num_rows += counts.num_rows
        self.num_positives += counts.num_positives
        return self

    def value(self) -> float:
        positives, negatives = self.num_positives, self.num_rows - self.num_positives
        if positives == 0 or negatives == 0:
            return NAN
        return (self._twice_rank_sum - positives * (positives + 1)) / (2.0 * positives * negatives)


def auc_by_group(
    scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], groups: npt.NDArray[np.integer]
) -> tuple[Int64s, Float64s, Int64s]:
    """Return (groups, their AUCs, their numbers of rows), each [g], of the groups that have both classes, ascending.

    Rows with a negative group are left out. ``scores`` (none NaN), ``labels`` (0 or 1) and ``groups`` are [n].
    """
    has_group = np.asarray(groups) >= 0
    scores, groups = np.asarray(scores, np.float64)[has_group], np.asarray(groups, np.int64)[has_group]
    positive = (np.asarray(labels) > 0.5)[has_group]
    if not len(groups):
        return np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64)
    order = np.lexsort((scores, groups))
    scores, groups, positive = scores[order], groups[order], positive[order]
    new_group = np.r_[True, groups[1:] != groups[:-1]]
    new_block = new_group | np.r_[True, scores[1:] != scores[:-1]]
    starts, first_row = np.flatnonzero(new_block), np.flatnonzero(new_group)
    sizes = np.diff(np.append(starts, len(groups)))
    positives = np.add.reduceat(positive.astype(np.int64), starts)
    group_of_block = np.cumsum(new_group)[starts] - 1
    twice_mid_rank = 2 * (starts - first_row[group_of_block] + sizes) - sizes + 1
    first_block = np.flatnonzero(new_group[starts])
    twice_rank_sum = np.add.reduceat(twice_mid_rank * positives, first_block)
    rows, num_positive = np.add.reduceat(sizes, first_block), np.add.reduceat(positives, first_block)
    both = (num_positive > 0) & (num_positive < rows)
    num_positive, rows = num_positive[both], rows[both]
    values = (twice_rank_sum[both] - num_positive * (num_positive + 1)) / (2.0 * num_positive * (rows - num_positive))
    return groups[first_row][both], values, rows


def gauc(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], groups: npt.NDArray[np.integer]) -> float:
    """Return the AUC within each user, weighted by the user's impressions: sum_u n_u AUC_u / sum_u n_u.

    Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018, equation 7. ``groups`` [n] are the
    rows' users. Users with only one class have no AUC and are left out of both sums, like rows with a negative group
    (user unknown). NaN if no user has both classes, or a score is NaN.
    """
    if any_nan(np.asarray(scores)):
        return NAN
    _, values, rows = auc_by_group(scores, labels, groups)
    return mean(values, rows)


def logloss(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], weights: Int64s | None = None) -> float:
    """Return the mean binary cross-entropy of [n] logits z against [n] labels y in [0, 1]: mean(log(1 + e^z) - y z).

    ``weights``: whole multiplicities of the rows [n]. NaN without rows.
    """
    logits = np.asarray(logits, np.float64)
    return mean(softplus(logits) - np.asarray(labels, np.float64) * logits, weights)


def normalized_entropy(
    logits: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], weights: Int64s | None = None
) -> float:
    """Return logloss / (-p log p - (1 - p) log(1 - p)), with p the share of positives in the split.

    Below 1, the model is better than predicting p for every row. He et al., Practical Lessons from Predicting Clicks on
    Ads at Facebook, ADKDD 2014, equation 1. NaN if only one class is present.
    """
    return logloss(logits, labels, weights) / entropy(mean(np.asarray(labels, np.float64), weights))


def entropy(share: float) -> float:
    """Return the entropy -p log p - (1 - p) log(1 - p) of p = ``share``; NaN for 0 and 1, since it is a divisor."""
    return NAN if not 0.0 < share < 1.0 else float(-share * np.log(share) - (1.0 - share) * np.log1p(-share))


def logloss_sum(counts: Counts) -> float:
    """Return the sum of binary cross-entropies over counted rows, of which :func:`logloss` is the mean."""
    return float((counts.totals * softplus(counts.scores) - counts.positives * counts.scores).sum())


def sigmoid(logits: npt.NDArray[np.floating]) -> Float64s:
    """Return 1 / (1 + e^-z), without overflow."""
    return np.exp(-softplus(-np.asarray(logits, np.float64)))


def softplus(values: npt.NDArray[np.floating]) -> Float64s:
    """Return log(1 + e^z), without overflow; NaN for NaN, without a warning."""
    with np.errstate(invalid="ignore"):
        return np.logaddexp(0.0, np.asarray(values, np.float64))


def mean(values: Any, weights: Any = None) -> float:
    """Return the mean of [n] values, weighted by [n] weights if given; NaN without values, or if all weights are 0."""
    values = np.asarray(values, np.float64)
    if values.size == 0 or (weights is not None and not np.any(weights)):
        return NAN
    return float(np.mean(values)) if weights is None else float(np.average(values, weights=weights))
