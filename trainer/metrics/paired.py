"""Differences in metrics of two models on the same rows, with confidence intervals. Torch-free.

Each difference also holds the influence of every row on it. If rows are independent, the squared influences add up to
its variance. Rows of one user are not independent: their influences are added up first.
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
    """One metric of two models on the same rows: the value of the first and of the second model.

    ``improvement``: of the second model over the first, in units of the metric; positive is better. ``influence``:
    float64 [n], contribution of each row to the error of ``improvement``; ``influences``: to those of both values.
    """

    first: float
    second: float
    improvement: float
    influence: Float64s
    influences: tuple[Float64s, Float64s]


def paired_auc(first: Float64s, second: Float64s, labels: Float64s) -> Paired:
    """Compare areas under the ROC curve (DeLong, DeLong and Clarke-Pearson, Biometrics 1988), in O(n log n).

    ``first``, ``second``: scores of the two models [n]. ``labels``: 0 or 1 [n], both present.
    """
    is_positive = labels > 0.5
    (area, influence), (other_area, other_influence) = (_auc(one, is_positive) for one in (first, second))
    return Paired(area, other_area, other_area - area, other_influence - influence, (influence, other_influence))


def _auc(scores: Float64s, is_positive: npt.NDArray[np.bool_]) -> tuple[float, Float64s]:
    """Return the area under the ROC curve, and the influence of each row on it, float64 [n]."""
    order = np.argsort(scores, kind="stable")
    starts = np.r_[True, scores[order][1:] != scores[order][:-1]]
    block = np.cumsum(starts) - 1

    def share_below(rows: npt.NDArray[np.bool_]) -> Float64s:
        """Return for each row the share of ``rows`` whose score is lower [n]; equal scores count half."""
        by_block = np.add.reduceat(rows[order].astype(np.int64), np.flatnonzero(starts))
        below = np.empty(len(scores))
        below[order] = (np.cumsum(by_block) - by_block / 2)[block] / by_block.sum()
        return below

    placement = np.where(is_positive, share_below(~is_positive), 1.0 - share_below(is_positive))
    area = float(placement[is_positive].mean())
    influence = placement - area
    for rows in (is_positive, ~is_positive):
        number = int(rows.sum())
        influence[rows] *= _unbiased(number) / number
    return area, influence


def paired_mean(first: Float64s, second: Float64s, *, lower_is_better: bool = False) -> Paired:
    """Compare the means of two models' values for the same rows, each [n]."""
    means = float(first.mean()), float(second.mean())
    better = first - second if lower_is_better else second - first
    improvement = float(better.mean())
    scale = _unbiased(len(first)) / len(first)
    influences = (first - means[0]) * scale, (second - means[1]) * scale
    return Paired(*means, improvement, (better - improvement) * scale, influences)


def paired_rmse(first: Float64s, second: Float64s) -> Paired:
    """Compare the root mean squares of two models' errors, each [n]; influences are by the delta method."""
    squares = [np.square(errors) for errors in (first, second)]
    roots = [float(square.mean()) ** 0.5 for square in squares]
    scale = _unbiased(len(first)) / len(first)
    of_first, of_second = (
        (square - root**2) * (scale / (2.0 * root)) if root else np.zeros(len(first))
        for square, root in zip(squares, roots, strict=True)
    )
    return Paired(roots[0], roots[1], roots[0] - roots[1], of_first - of_second, (of_first, of_second))


def _unbiased(number: int) -> float:
    """Return sqrt(n / (n - 1)) for n = ``number``: the factor that makes a sample variance unbiased; 1 for n <= 1."""
    return (number / (number - 1)) ** 0.5 if number > 1 else 1.0


def _logloss(rows: Rows) -> Float64s:
    return softplus(rows.scores) - np.asarray(rows.labels, np.float64) * rows.scores


def _errors(rows: Rows) -> Float64s:
    return rows.predictions - rows.labels


PAIRED: dict[str, Callable[[Rows, Rows], Paired]] = {
    "auc": lambda one, other: paired_auc(*(np.asarray(a, np.float64) for a in (one.scores, other.scores, one.labels))),
    "logloss": lambda *both: paired_mean(*map(_logloss, both), lower_is_better=True),
    "rmse": lambda *both: paired_rmse(*map(_errors, both)),
    "mae": lambda *both: paired_mean(*(np.abs(_errors(rows)) for rows in both), lower_is_better=True),
}
"""Metrics by which two models are compared on labelled rows: functions of the rows with either model's scores."""


def interval(paired: Paired, units: Int64s | None = None, level: float = 0.95) -> tuple[float, float]:
    """Return (low, high), the normal confidence interval of the improvement.

    ``units``: the unit of each row [n], such as its user, from 0; None: rows are independent. ``level``: probability
    that the interval holds the improvement.
    """
    margin = NormalDist().inv_cdf((1.0 + level) / 2.0) * standard_error(paired.influence, units)
    return paired.improvement - margin, paired.improvement + margin


def standard_error(influence: Float64s, units: Int64s | None = None) -> float:
    """Return the standard error of a value from the influences of rows on it.

    ``influence``: contribution of each row to the error of the value [n]. ``units``: as in :func:`interval`.
    """
    if units is not None:
        influence = np.bincount(units, influence).astype(np.float64) * _unbiased(len(np.unique(units)))
    return float((influence**2).sum()) ** 0.5
