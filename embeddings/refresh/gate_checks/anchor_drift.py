"""Drift of the vectors from the version on which their consumers were fitted."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import MIN_EVIDENT, Comparison
from embeddings.refresh.gate_checks.cosines import cosines_of
from embeddings.vectors.item_vectors import shared_rows

DRIFT = "anchor_cosine"


class AnchorDrift(GateCheck):
    """``anchor_cosine``: mean cosine of the candidate's items to those of the version that drift is counted from.

    That version is the first of the anchor generation, or a later version that somebody promoted although this check
    had held it. Each refresh may be close to the refresh before it, while the last is far from the first, on which a
    consumer was fitted. The mean is over items found in both versions with enough training rows; with fewer than
    ``MIN_EVIDENT`` there is no metric.
    """

    about = "vectors"
    limits = (
        Limit(
            DRIFT,
            0.5,
            "the vectors have drifted far from the first version of their anchor generation: retrain the consumers "
            "that were fitted on it, then promote this version with a reason and override_gate: drift is then "
            "counted from it",
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        anchor, candidate = comparison.anchor, comparison.candidate
        if anchor is None or anchor.dim != candidate.dim:
            return {}
        old, new = shared_rows(anchor.keys, candidate.keys)
        both = comparison.usable[new] & anchor.renewed[old]
        for counts, rows in ((anchor.counts, old), (candidate.counts, new)):
            if counts is not None:
                both &= counts[rows] >= comparison.min_count
        if int(np.count_nonzero(both)) < MIN_EVIDENT:
            return {}
        cosines = cosines_of(anchor.vectors, candidate.vectors, old[both], new[both])
        return {DRIFT: float(cosines.mean()), "anchor_shared": float(len(cosines))}
