"""Platt scaling: a logistic curve of the model's log odds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from trainer.metrics.classification import sigmoid, softplus
from trainer.output_calibration.base import Calibrator, Float64s, smoothed_targets

_MAX_STEPS, _MAX_HALVINGS = 100, 40
_GRADIENT = 1e-10
"""Bound on the two derivatives of the mean loss: the fit ends when both are smaller in absolute value."""
_RIDGE = 1e-12
"""Number added to the diagonal of the Hessian, which is singular if all scores are alike."""


@dataclass(frozen=True)
class Platt(Calibrator):
    """p = sigmoid(slope z + intercept).

    Platt, Probabilistic Outputs for Support Vector Machines, 1999, whose targets are smoothed; fitted by Newton's
    method with backtracking, as in Lin, Lin and Weng, A Note on Platt's Probabilistic Outputs, Machine Learning 2007.
    """

    slope: float
    intercept: float

    @classmethod
    def fit(cls, logits: Float64s, labels: Float64s, weights: Float64s) -> Self:
        low, high = smoothed_targets(labels, weights)
        targets, shares = np.where(labels > 0.5, high, low), weights / weights.sum()
        center, scale = float(shares @ logits), max(float(logits.std()), 1e-12)
        # Standardized log odds, so that one bound on the gradient suits scores of any size.
        columns = np.stack([(logits - center) / scale, np.ones_like(logits)])
        found = _newton(columns, targets, shares)
        slope = float(found[0]) / scale
        return cls(slope, float(found[1]) - slope * center)

    def probabilities(self, logits: npt.NDArray[np.floating]) -> Float64s:
        return sigmoid(self.slope * np.asarray(logits, np.float64) + self.intercept)


def _newton(columns: Float64s, targets: Float64s, shares: Float64s) -> Float64s:
    """Return the weights [2] of ``columns`` [2, n] that minimize the cross-entropy against ``targets`` [n].

    ``shares``: weights of the rows [n], which add up to 1.
    """

    def loss(at: Float64s) -> float:
        scores = at @ columns
        return float(shares @ (softplus(scores) - targets * scores))

    share = float(shares @ targets)
    point = np.array([0.0, np.log(share / (1.0 - share))])
    now = loss(point)
    for _ in range(_MAX_STEPS):
        probabilities = sigmoid(point @ columns)
        gradient = columns @ (shares * (probabilities - targets))
        if np.abs(gradient).max() < _GRADIENT:
            break
        curvature = shares * probabilities * (1.0 - probabilities)
        step = np.linalg.solve((columns * curvature) @ columns.T + _RIDGE * np.eye(2), gradient)
        length = 1.0
        for _ in range(_MAX_HALVINGS):
            trial = point - length * step
            if (value := loss(trial)) <= now:
                break
            length /= 2.0
        else:  # only rounding separates this point from the minimum
            break
        point, now = trial, value
    return point
