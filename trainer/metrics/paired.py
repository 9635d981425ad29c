"""Differences of two models on the same rows, with intervals: how much better the second one is. Torch-free.

A difference comes with the influence of each row on it, whose squares add up to its variance where rows are
independent. Rows of one user are not: their influences are added up first.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.metrics.classification import softplus
from trainer.metrics.counts import Float64s, Int64s
from trainer.metrics.pointwise import Rows


class Paired(NamedTuple):
    """One metric of two models on the same rows.

    Attributes:
        first: value of the first model.
        second: value of the second.
        improvement: of the second over the first, in units of the metric; positive is better.
        influence: float64 [n], part of each row in the error of the improvement.
    """

    first: float
    second: float
    improvement: float
    influence: Float64s


def paired_auc(first: Float64s, second: Float64s, labels: Float64s, weights: Float64s | None = None) -> Paired:
    """Compare areas under the ROC curve (DeLong, DeLong and Clarke-Pearson, Biometrics 1988), in O(n log n).

    Args:
        first: scores of the first model [n].
        second: scores of the second [n].
        labels: 0 or 1 [n], some of each.
        weights: of the rows [n]; None: 1.
    """
    is_positive = labels > 0.5
    weights = np.ones(len(labels)) if weights is None else weights
    (area, influence), (other_area, other_influence) = (_auc(one, is_positive, weights) for one in (first, second))
    return Paired(area, other_area, other_area - area, other_influence - influence)


def _auc(scores: Float64s, is_positive: npt.NDArray[np.bool_], weights: Float64s) -> tuple[float, Float64s]:
    """Return the area under the ROC curve, and the influence of each row on it."""
    order = np.argsort(scores, kind="stable")
    starts = np.r_[True, scores[order][1:] != scores[order][:-1]]
    block = np.cumsum(starts) - 1

    def share_below(rows: npt.NDArray[np.bool_]) -> Float64s:
        """Return for each row the weight of ``rows`` below it, ties half, as a share of their weight."""
        by_block = np.add.reduceat(np.where(rows, weights, 0.0)[order], np.flatnonzero(starts))
        below = np.empty(len(scores))
        below[order] = (np.cumsum(by_block) - by_block / 2)[block] / by_block.sum()
        return below

    placement = np.where(is_positive, share_below(~is_positive), 1.0 - share_below(is_positive))
    area = float(np.average(placement[is_positive], weights=weights[is_positive]))
    influence = np.empty(len(scores))
    for rows in (is_positive, ~is_positive):
        number = int(rows.sum())
        influence[rows] = weights[rows] / weights[rows].sum() * (placement[rows] - area) * _unbiased(number)
    return area, influence


def paired_mean(
    first: Float64s, second: Float64s, weights: Float64s | None = None, *, lower_is_better: bool = False
) -> Paired:
    """Compare means of a value of each row [n]; ``weights`` [n], None: 1."""
    share = np.full(len(first), 1.0 / len(first)) if weights is None else weights / weights.sum()
    means = float((share * first).sum()), float((share * second).sum())
    sign = -1.0 if lower_is_better else 1.0
    improvement = sign * (means[1] - means[0])
    return Paired(
        *means, improvement, share * (sign * (second - first) - improvement) * _unbiased(len(first))
    )  # fmt: skip


def paired_rmse(first: Float64s, second: Float64s, weights: Float64s | None = None) -> Paired:
    """Compare roots of mean squares of errors [n], by the delta method."""
    share = np.full(len(first), 1.0 / len(first)) if weights is None else weights / weights.sum()
    roots, influence = [], np.zeros(len(first))
    for errors, sign in ((first, 1.0), (second, -1.0)):
        square = float((share * errors**2).sum())
        roots.append(square**0.5)
        if square:
            influence += sign * share * (errors**2 - square) / (2.0 * square**0.5)
    return Paired(roots[0], roots[1], roots[0] - roots[1], influence * _unbiased(len(first)))


def _unbiased(number: int) -> float:
    """Return the factor of deviations from a mean of ``number`` values by which their squares give its variance."""
    return (number / (number - 1)) ** 0.5 if number > 1 else 1.0


def _auc_of_rows(first: Rows, second: Rows, weights: Float64s | None) -> Paired:
    return paired_auc(*_float64(first.scores, second.scores, first.labels), weights)


def _logloss_of_rows(first: Rows, second: Rows, weights: Float64s | None) -> Paired:
    losses = (softplus(rows.scores) - np.asarray(rows.labels, np.float64) * rows.scores for rows in (first, second))
    return paired_mean(*losses, weights, lower_is_better=True)


def _mae_of_rows(first: Rows, second: Rows, weights: Float64s | None) -> Paired:
    return paired_mean(
        *(np.abs(rows.predictions - rows.labels) for rows in (first, second)), weights, lower_is_better=True
    )


def _rmse_of_rows(first: Rows, second: Rows, weights: Float64s | None) -> Paired:
    return paired_rmse(*(rows.predictions - rows.labels for rows in (first, second)), weights)


PAIRED: dict[str, Callable[[Rows, Rows, Float64s | None], Paired]] = {
    "auc": _auc_of_rows,
    "logloss": _logloss_of_rows,
    "rmse": _rmse_of_rows,
    "mae": _mae_of_rows,
}
"""Metrics of labelled rows by which two models are compared: from the rows with each one's scores, and weights."""


def _float64(*arrays: npt.NDArray[np.floating]) -> tuple[Float64s, ...]:
    return tuple(np.asarray(one, np.float64) for one in arrays)


def interval(paired: Paired, units: Int64s | None = None, level: float = 0.95) -> tuple[float, float]:
    """Return the normal interval of the improvement.

    Args:
        paired: the difference.
        units: the unit of each row [n], such as its user, from 0; None: rows are independent.
        level: probability that the interval holds the improvement.
    """
    influence = paired.influence
    if units is not None:
        influence = np.bincount(units, influence)
        influence = influence * _unbiased(len(np.unique(units)))
    margin = NormalDist().inv_cdf((1.0 + level) / 2.0) * float((influence**2).sum()) ** 0.5
    return paired.improvement - margin, paired.improvement + margin
