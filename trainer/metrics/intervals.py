"""Bootstrap intervals of metrics, from resampled rows or users: the uncertainty due to the choice of held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from trainer.metrics.counts import Int64s

Statistic = Callable[[Int64s], Mapping[str, float]]
"""Function from the multiplicities of the resampled units (rows or users) to {metric: value}."""


def multiplicities(num_units: int, seed: int, replicate: int) -> Int64s:
    """Draw ``num_units`` units with replacement, and return how often each was drawn, int64 [num_units].

    The result depends only on the arguments.
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, replicate]))
    return np.bincount(generator.integers(0, num_units, num_units), minlength=num_units)


def bootstrap(
    statistic: Statistic, num_units: int, *, replicates: int, seed: int, level: float = 0.95
) -> dict[str, tuple[float, float]]:
    """Return (low, high) by metric: its percentile interval of level ``level`` over bootstrap replicates.

    Efron, Bootstrap methods, Annals of Statistics 1979. Replicates in which a metric has no value (only one class) are
    left out of its interval; if it has a value in none, the bounds are NaN.
    """
    if num_units == 0:
        return {}
    drawn = [statistic(multiplicities(num_units, seed, replicate)) for replicate in range(replicates)]
    return {name: percentiles(np.array([one[name] for one in drawn]), level) for name in drawn[0]}


def percentiles(values: npt.NDArray[np.floating], level: float) -> tuple[float, float]:
    """Return (low, high), between which the middle share ``level`` of the values [r] lies; NaN values are left out."""
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
