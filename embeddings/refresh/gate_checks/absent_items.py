"""Items that the candidate has no vector for."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, ratio, share
from embeddings.vectors.item_vectors import FOUND, MISSING

_GONE = "check that the data is whole and the ids are the same ones"


class Missing(GateCheck):
    """``missing``: share of all ids that would be served without a vector."""

    needs_previous = False
    limits = (
        Limit("missing", 0.5, "items have never had a vector: check the training data, then run again", at_most=True),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        without = ~comparison.usable
        if comparison.previous is None:
            return {"missing": share(without)}
        old, new = comparison.common
        without[new[comparison.previous.statuses[old] != MISSING]] = False
        num_missing = int(np.count_nonzero(without))
        return {"missing": num_missing / max(num_missing + _num_served(comparison), 1)}


class Carried(GateCheck):
    """``carried``: share of what would be served with an old vector; ``newly_carried``: and had one of its own.

    ``newly_carried`` is the share of the items that the previous version had found and the candidate has not;
    ``newly_carried_traffic`` the same by the previous counts.
    """

    limits = (
        Limit(
            "carried",
            0.9,
            "most of what would be served is old: check that the window of the data has the items",
            at_most=True,
        ),
        Limit(
            "newly_carried",
            0.5,
            f"items that were there are gone: {_GONE}",
            at_most=True,
            calibrated=Calibrated(1.0, 0.05),
        ),
        Limit(
            "newly_carried_traffic",
            0.5,
            f"popular items are gone: {_GONE}",
            at_most=True,
            calibrated=Calibrated(1.0, 0.05),
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        previous = comparison.served
        is_carried = ~comparison.renewed
        had_vector = previous.statuses == FOUND
        lost = had_vector & is_carried
        metrics = {
            "carried": int(np.count_nonzero(is_carried)) / max(_num_served(comparison), 1),
            "newly_carried": ratio(np.count_nonzero(lost), np.count_nonzero(had_vector)),
        }
        if previous.counts is not None and previous.counts[had_vector].any():
            metrics["newly_carried_traffic"] = ratio(previous.counts[lost].sum(), previous.counts[had_vector].sum())
        return metrics


def _num_served(comparison: Comparison) -> int:
    return int(np.count_nonzero(comparison.usable)) + int(np.count_nonzero(~comparison.renewed))
