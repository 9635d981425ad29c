"""How far norms changed, which are published beside directions."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import MIN_EVIDENT, Comparison, share

_REMEDY = (
    "published directions are fine, but norms changed: check learning rate, decay and initial values; consumers that "
    "read norms would notice"
)


class Norms(GateCheck):
    """``norm_shift``, ``norm_moved``, ``norm_outside`` and ``norm_change_p95`` of the shared items.

    ``norm_shift``: the factor (at least 1) between the median norms; ``norm_moved``: share of items whose norm changed
    by more than a factor of 2 beyond that; ``norm_outside``: share of norms outside the range of the previous version
    (its .5th to 99.5th percentile). Items of norm zero, whose direction was carried from another version, do not count.
    ``norm_change_p95``: 95th percentile of how much norms changed, .3 for a factor of 1.3 or 1 / 1.3, beyond what all
    did and what the item's rows of training say (a straight line of log norms on log rows): who is clicked twice as
    often gets a longer vector. Of the ``counted`` items; left out where they are fewer than ``MIN_EVIDENT``.

    The starting limits bind hardly: only a calibration, or halves of the rows, know what norms do.
    """

    limits = (
        Limit("norm_shift", 10.0, _REMEDY, at_most=True, calibrated=Calibrated(1.2, 0.0, by_halves=1.5)),
        Limit("norm_moved", 0.75, _REMEDY, at_most=True, calibrated=Calibrated(1.0, 0.005, by_halves=0.05)),
        Limit("norm_outside", 1.0, _REMEDY, at_most=True, calibrated=Calibrated(1.5, 0.02)),
        Limit("norm_change_p95", 9.0, _REMEDY, at_most=True, calibrated=Calibrated(1.0, 0.06, by_halves=0.3)),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        old, new = comparison.shared
        before, after = comparison.served.norms[old], comparison.candidate.norms[new]
        both = (before > 0) & (after > 0) & np.isfinite(before) & np.isfinite(after)
        if not both.any():
            return {"norm_shift": float("nan"), "norm_moved": float("nan"), "norm_outside": float("nan")}
        before, after = before[both].astype(np.float64), after[both].astype(np.float64)
        shift = float(np.median(after) / np.median(before))
        change = np.abs(np.log(after / before / shift))
        low, high = np.percentile(before, [0.5, 99.5])
        return {
            "norm_shift": max(shift, 1.0 / shift),
            "norm_moved": share(change > np.log(2.0)),
            "norm_outside": share((after < low) | (after > high)),
            **_beyond_counts(comparison),
        }


def _beyond_counts(comparison: Comparison) -> dict[str, float]:
    (old, new), num_rows = comparison.counted
    norms = np.stack([comparison.served.norms[old], comparison.candidate.norms[new]]).astype(np.float64)
    both = (norms > 0).all(axis=0) & np.isfinite(norms).all(axis=0)
    if np.count_nonzero(both) < MIN_EVIDENT:
        return {}
    change = np.log(norms[1, both] / norms[0, both])
    growth = np.log(num_rows[1, both] / num_rows[0, both])
    growth -= growth.mean()
    variance = growth @ growth
    if variance > 0:
        change -= (growth @ change) / variance * growth
    return {"norm_change_p95": float(np.expm1(np.percentile(np.abs(change - np.median(change)), 95)))}
