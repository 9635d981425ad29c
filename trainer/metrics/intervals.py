"""Bootstrap intervals: what a metric would have been on other held-out rows, or users, of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from trainer.metrics.counts import Int64s

Statistic = Callable[[Int64s], Mapping[str, float]]
"""From multiplicities of the units to metrics by name."""


def multiplicities(num_units: int, seed: int, replicate: int) -> Int64s:
    """Count each of ``num_units`` among as many drawn with replacement.

    The result is a function of (seed, replicate).
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, replicate]))
    return np.bincount(generator.integers(0, num_units, num_units), minlength=num_units)


def bootstrap(
    statistic: Statistic, num_units: int, *, replicates: int, seed: int, level: float = 0.95
) -> dict[str, tuple[float, float]]:
    """Return by metric the percentile interval of ``level``.

    Efron, Bootstrap methods, Annals of Statistics 1979. A replicate in which a metric has no value (one class alone) is
    left out of its interval; NaN where none has one.
    """
    if num_units == 0:
        return {}
    drawn = [statistic(multiplicities(num_units, seed, replicate)) for replicate in range(replicates)]
    return {name: percentiles(np.array([one[name] for one in drawn]), level) for name in drawn[0]}


def percentiles(values: npt.NDArray[np.floating], level: float) -> tuple[float, float]:
    """Return the bounds of the middle ``level`` of [r] values, NaN left out."""
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
