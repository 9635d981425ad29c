"""Size of the candidate, and the shares of its rows that are finite and usable."""

from __future__ import annotations

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, share


class Rows(GateCheck):
    """``dim``; ``rows``; ``finite``, share of rows without NaN or infinity; ``coverage``.

    ``coverage`` is the share of live items that have a usable vector: evidence, finite, not zero.
    """

    needs_previous = False
    limits = (
        Limit("finite", 1.0, "the model diverged: lower the learning rate, or look for broken input"),
        Limit("coverage", 0.95, "live items have no vector: check the training data and the evidence of the rows"),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        candidate = comparison.candidate
        return {
            "dim": float(candidate.dim),
            "rows": float(len(candidate)),
            "finite": share(comparison.finite),
            "coverage": share(comparison.usable[comparison.live]),
        }
