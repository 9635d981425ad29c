"""How far norms changed, which are published beside directions."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import MIN_EVIDENT, Comparison

_REMEDY = (
    "published directions are fine, but norms changed: check learning rate, decay and initial values; consumers that "
    "read norms would notice"
)


class Norms(GateCheck):
    """``norm_change_p95``: 95th percentile of how much norms changed: .3 for a factor of 1.3, or of 1 / 1.3.

    Growth with an item's own rows of training is taken off first, by a straight line of log norms on log rows: an item
    with twice the clicks gets a longer vector. Of items with two rows or more in both versions; left out where there
    are fewer than ``MIN_EVIDENT`` of them. ``norm_shift``: the factor between the median norms, which informs.
    """

    about = "vectors"
    limits = (
        Limit("norm_change_p95", 9.0, _REMEDY, at_most=True, spread=0.04),
        Limit("norm_shift", None, _REMEDY, at_most=True),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
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
            change -= (growth @ (change - change.mean())) / variance * growth
        shift = float(np.exp(abs(np.median(change))))
        return {"norm_change_p95": float(np.expm1(np.percentile(np.abs(change), 95))), "norm_shift": shift}
