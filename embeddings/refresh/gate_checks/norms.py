"""Change of the vectors' norms, which are published along with their directions."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import MIN_EVIDENT, Comparison

_REMEDY = (
    "published directions are fine, but norms changed: check learning rate, decay and initial values; consumers that "
    "read norms would notice"
)


class Norms(GateCheck):
    """``norm_change_p95``: 95th percentile of the norms' relative change: .3 for a factor of 1.3, or of 1 / 1.3.

    More clicks give longer vectors. So the change of log norms is first fitted, linearly, to the change of the log
    number of training rows, and the fit is subtracted. Items with fewer than two rows in either version do not
    count; with fewer than ``MIN_EVIDENT`` items there are no metrics. ``norm_shift``: factor of the median change; it
    has no limit.
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
