"""Isotonic regression: the monotone curve that fits best, by pooling adjacent violators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trainer.output_calibration.base import Calibrator, Float64s, smoothed_targets

_WORTH_A_ROUND = 0.8
"""Largest share of the blocks that a round over whole arrays may leave for another such round to follow."""


@dataclass(frozen=True)
class Isotonic(Calibrator):
    """A curve through points, linear between them and constant beyond the first and the last.

    Zadrozny and Elkan, Transforming Classifier Scores into Accurate Multiclass Probability Estimates, KDD 2002. The
    probabilities are kept within Platt's smoothed targets.

    Attributes:
        logits: log odds of the points, ascending: the first and the last score of each block.
        values: calibrated probabilities of the points, non-descending.
    """

    logits: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def fit(cls, logits: Float64s, labels: Float64s, weights: Float64s) -> Self:
        distinct, place = np.unique(logits, return_inverse=True)
        totals = np.bincount(place, weights, len(distinct)).astype(np.float64)
        means = np.bincount(place, weights * (labels > 0.5), len(distinct)) / totals
        values, sizes = pool_adjacent_violators(means, totals)
        ends = np.cumsum(sizes)
        points = np.unique(np.concatenate([ends - sizes, ends - 1]))
        low, high = smoothed_targets(labels, weights)
        fitted = np.clip(np.repeat(values, sizes)[points], low, high)
        return cls(tuple(distinct[points].tolist()), tuple(fitted.tolist()))

    def probabilities(self, logits: npt.NDArray[np.floating]) -> Float64s:
        return np.interp(np.asarray(logits, np.float64), self.logits, self.values)

    def settings(self) -> dict[str, Any]:
        return {"logits": list(self.logits), "values": list(self.values)}

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Self:
        return cls(tuple(settings["logits"]), tuple(settings["values"]))


def pool_adjacent_violators(
    values: npt.NDArray[np.floating], weights: npt.NDArray[np.floating]
) -> tuple[Float64s, npt.NDArray[np.int64]]:
    """Return the non-descending sequence x with the least sum_i w_i (x_i - v_i)^2, as blocks of equal x, in O(n).

    Ayer, Brunk, Ewing, Reid and Silverman, An Empirical Distribution Function for Sampling with Incomplete
    Information, Annals of Mathematical Statistics 1955.

    Args:
        values: [n], n >= 1.
        weights: [n], above 0.

    Returns:
        (Value of each block, strictly ascending; number of its elements), each [blocks].
    """
    sums, totals = values * weights, np.asarray(weights, np.float64)
    sizes = np.ones(len(values), np.int64)
    while True:
        means = sums / totals
        # A run that does not ascend is one block, in whatever order its neighbours are pooled.
        starts = np.flatnonzero(np.r_[True, means[1:] > means[:-1]])
        before, now = len(sums), len(starts)
        sums, totals, sizes = (np.add.reduceat(each, starts) for each in (sums, totals, sizes))
        if now > _WORTH_A_ROUND * before:
            break
    blocks: list[list[float]] = []
    for total_sum, total, size in zip(sums.tolist(), totals.tolist(), sizes.tolist(), strict=True):
        block = [total_sum, total, size]
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:
            block = [one + other for one, other in zip(blocks.pop(), block, strict=True)]
        blocks.append(block)
    found = np.array(blocks)
    return found[:, 0] / found[:, 1], found[:, 2].astype(np.int64)
