"""Calibration of predicted probabilities: calibration curve and expected calibration error (ECE)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.metrics.counts import Counts, Float64s, any_nan, by_score

NUM_BINS = 10


class Curve(NamedTuple):
    """A calibration curve: for each bin its number of rows, their mean prediction and share of positives, each [b].

    Bins without a row are left out. Numbers of rows may be fractions, since bins of equal mass may share rows of equal
    prediction.
    """

    rows: Float64s
    predictions: Float64s
    shares: Float64s


class _Bins:
    """Base of binnings: for each of b bins, sums of rows, predictions and positives, float64 [3, b]."""

    def __init__(self, num_bins: int = NUM_BINS):
        self._sums = np.zeros((3, num_bins))

    def curve(self) -> Curve:
        rows, predictions, positives = self._sums[:, self._sums[0] > 0]
        return Curve(rows, predictions / rows, positives / rows)


class EqualWidth(_Bins):
    """Bins of equal width: [i / b, (i + 1) / b) of the prediction; the last bin includes 1.

    Guo et al., On Calibration of Modern Neural Networks, ICML 2017. Rows may be added in any order.
    """

    def add(self, counts: Counts) -> EqualWidth:
        """Add rows; ``counts.scores`` are predictions in [0, 1]."""
        num_bins = self._sums.shape[1]
        # Compare with the edges themselves: a product may round up to the next bin.
        edges = np.arange(1, num_bins) / num_bins
        number = np.searchsorted(edges, counts.scores, side="right")
        for row, values in enumerate((counts.totals, counts.totals * counts.scores, counts.positives)):
            self._sums[row] += np.bincount(number, values, num_bins)
        return self


class EqualMass(_Bins):
    """Bins of equal mass (adaptive bins): rows sorted by prediction are cut into b bins with equal numbers of rows.

    Nguyen and O'Connor, EMNLP 2015. If a cut falls among rows of equal prediction, both bins get them in proportion, so
    that the order of rows does not matter. Rows must be added by ascending prediction, ``num_rows`` in all.
    """

    def __init__(self, num_rows: int, num_bins: int = NUM_BINS):
        super().__init__(num_bins)
        self._edges = num_rows * np.arange(num_bins + 1) / num_bins
        self._before = 0

    def add(self, counts: Counts) -> EqualMass:
        """Add rows; ``counts.scores`` are predictions in [0, 1], none of them below a prediction added before."""
        ends = self._before + np.cumsum(counts.totals)
        cumulative = (counts.totals, counts.totals * counts.scores, counts.positives)
        inside = np.clip(self._edges, self._before, ends[-1]) if len(ends) else self._edges * 0.0
        places = np.concatenate([[self._before], ends])
        for row, values in enumerate(cumulative):
            # Within the rows of one prediction, the sum over all rows before a position grows linearly.
            self._sums[row] += np.diff(np.interp(inside, places, np.concatenate([[0.0], np.cumsum(values)])))
        self._before = int(places[-1])
        return self


def calibration_curve(
    predictions: npt.NDArray[np.floating],
    labels: npt.NDArray[np.floating],
    num_bins: int = NUM_BINS,
    *,
    equal_mass: bool = True,
) -> Curve:
    """Return the calibration curve of [n] predictions in [0, 1], none NaN, against [n] labels (0 or 1).

    Without rows the curve has no bins.
    """
    counts = by_score(predictions, labels)
    bins = EqualMass(counts.num_rows, num_bins) if equal_mass else EqualWidth(num_bins)
    return bins.add(counts).curve()


def ece(
    predictions: npt.NDArray[np.floating],
    labels: npt.NDArray[np.floating],
    num_bins: int = NUM_BINS,
    *,
    equal_mass: bool = True,
) -> float:
    """Return sum_b n_b / n |share of positives in b - mean prediction in b|, the expected calibration error.

    Guo et al., On Calibration of Modern Neural Networks, ICML 2017, equation 3. NaN without rows, or if a prediction is
    NaN.
    """
    if any_nan(np.asarray(predictions)):
        return float("nan")
    return ece_of(calibration_curve(predictions, labels, num_bins, equal_mass=equal_mass))


def ece_of(curve: Curve) -> float:
    """Return the expected calibration error (:func:`ece`) of a curve; NaN if it has no bins."""
    if not len(curve.rows):
        return float("nan")
    return float(np.average(np.abs(curve.shares - curve.predictions), weights=curve.rows))
