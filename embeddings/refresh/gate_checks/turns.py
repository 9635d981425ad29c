"""How far the few items turned that turned most."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import MIN_EVIDENT, Comparison
from embeddings.refresh.gate_checks.cosines import cosines_of


class Turns(GateCheck):
    """``turn_p999``: 99.9th percentile of ``(1 - cosine) n / (n + 1)``, n the fewer rows of training of the two.

    A few items that have the vectors of others move no mean and no 5th percentile. What shows them is that an item of
    many rows points where it cannot have got to by chance, while one of two rows may: so a turn counts by the rows
    that speak for it, and items of one row, which say nothing, do not. Of fewer than a thousand items it is the largest
    turn. Of the ``counted`` items; left out where they are fewer than ``MIN_EVIDENT``.

    The starting limit never binds: only nulls know what the items that move most do.
    """

    about = "vectors"
    limits = (
        Limit(
            "turn_p999",
            2.0,
            "a few items point elsewhere than all their rows of training let them: check that ids and rows belong "
            "together",
            at_most=True,
            calibrated=Calibrated(1.2, 0.15, by_halves=0.9),
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        (old, new), num_rows = comparison.counted
        if len(old) < MIN_EVIDENT:
            return {}
        fewer = num_rows.min(axis=0)
        cosines = cosines_of(comparison.served.vectors, comparison.candidate.vectors, old, new)
        turns = (1.0 - cosines) * fewer / (fewer + 1.0)
        return {"turn_p999": float(np.percentile(turns, 99.9, method="higher"))}
