"""How far norms changed, which are published beside directions."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, share

_REMEDY = (
    "published directions are fine, but norms changed: check learning rate, decay and initial values; consumers that "
    "read norms would notice"
)


class Norms(GateCheck):
    """``norm_shift``, ``norm_moved`` and ``norm_outside`` of the shared items.

    ``norm_shift``: the factor (at least 1) between the median norms; ``norm_moved``: share of items whose norm changed
    by more than a factor of 2 beyond that; ``norm_outside``: share of norms outside the range of the previous version
    (its .5th to 99.5th percentile). Items of norm zero, whose direction was carried from another version, do not count.

    The starting limits bind hardly: only a calibration knows what norms do.
    """

    limits = (
        Limit("norm_shift", 10.0, _REMEDY, at_most=True, calibrated=Calibrated(1.2, 0.0)),
        Limit("norm_moved", 0.75, _REMEDY, at_most=True, calibrated=Calibrated(1.0, 0.005)),
        Limit("norm_outside", 1.0, _REMEDY, at_most=True, calibrated=Calibrated(1.5, 0.02)),
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
        }
