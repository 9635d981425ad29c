"""Errors of predictions against real-valued labels, in float64 numpy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trainer.metrics.classification import mean
from trainer.metrics.counts import Int64s


def rmse(
    predictions: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], weights: Int64s | None = None
) -> float:
    """Return the root of the mean squared difference of [n] predictions and labels. NaN if empty."""
    errors = np.asarray(predictions, np.float64) - np.asarray(labels, np.float64)
    return math.sqrt(mean(errors**2, weights))


def mae(
    predictions: npt.NDArray[np.floating], labels: npt.NDArray[np.floating], weights: Int64s | None = None
) -> float:
    """Return the mean absolute difference of [n] predictions and labels. NaN if empty."""
    return mean(np.abs(np.asarray(predictions, np.float64) - np.asarray(labels, np.float64)), weights)
