"""Items that the candidate has no vector for."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, ratio, share
from embeddings.vectors.item_vectors import MISSING, Array, ItemVectors

RECENT_PUBLICATIONS = 7
"""Where all items are new each day, seven of eight that were found this week are carried: below the limit of .9."""
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
    """What of the previous version the candidate has not, and what has come in its place.

    ``carried``: share of old vectors in what would be served of the items that this version or one of the last
    ``RECENT_PUBLICATIONS`` has found; ``carried_all``: of everything that would be served, without a limit.
    ``newly_carried``: share of the items that the previous version had found and the candidate has not;
    ``newly_carried_traffic`` the same by the previous counts. ``unreplaced``: ``newly_carried`` less the items that the
    candidate alone has found, as a share of the same whole; ``unreplaced_traffic``: ``newly_carried_traffic`` less the
    share of such items in the candidate's counts. ``newly_carried_rise``: ``newly_carried`` less what it was of the
    previous version itself.

    Where items live for a day or two most of them are gone on the next: the items that took their place tell that from
    truncated data, and a rise above what is usual tells it from changed ids.
    """

    about = "items"
    limits = (
        Limit(
            "carried",
            0.9,
            "most of what would be served is old: check that the window of the data has the items",
            at_most=True,
        ),
        Limit("newly_carried", 0.95, f"items that were there are gone: {_GONE}", at_most=True),
        Limit("newly_carried_rise", 0.5, f"many more items are gone than in the refresh before: {_GONE}", at_most=True),
        Limit(
            "unreplaced",
            0.5,
            f"items that were there are gone, and no others in their place: {_GONE}",
            at_most=True,
            calibrated=Calibrated(1.0, 0.05),
        ),
        Limit(
            "unreplaced_traffic",
            0.5,
            f"popular items are gone, and no others in their place: {_GONE}",
            at_most=True,
            calibrated=Calibrated(1.0, 0.05),
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        previous, candidate = comparison.served, comparison.candidate
        is_carried = ~comparison.renewed
        had_vector = previous.renewed
        lost = had_vector & is_carried
        num_had, num_found = int(np.count_nonzero(had_vector)), int(np.count_nonzero(comparison.usable))
        num_recent = int(np.count_nonzero(is_carried & _is_recent(previous)))
        num_new = num_found - len(comparison.shared[0])
        newly_carried = ratio(np.count_nonzero(lost), num_had)
        metrics = {
            "carried": num_recent / max(num_found + num_recent, 1),
            "carried_all": int(np.count_nonzero(is_carried)) / max(_num_served(comparison), 1),
            "newly_carried": newly_carried,
            "unreplaced": max(0.0, newly_carried - ratio(num_new, num_had)),
        }
        before = comparison.metrics_before.get("newly_carried")
        if before is not None:
            metrics["newly_carried_rise"] = newly_carried - before
        if previous.counts is None or not previous.counts[had_vector].any():
            return metrics
        metrics["newly_carried_traffic"] = ratio(previous.counts[lost].sum(), previous.counts[had_vector].sum())
        arrived = comparison.usable.copy()
        arrived[comparison.shared[1]] = False
        counts = candidate.counts
        replaced = 0.0 if counts is None else ratio(counts[arrived].sum(), counts[comparison.usable].sum())
        metrics["unreplaced_traffic"] = max(0.0, metrics["newly_carried_traffic"] - replaced)
        return metrics


def _is_recent(previous: ItemVectors) -> Array:
    """Return which items of the previous version were found by it or by one of those before it, bool [its rows]."""
    if previous.carried_for is None:
        return np.ones(len(previous), dtype=np.bool_)
    recent: Array = previous.carried_for < RECENT_PUBLICATIONS
    return recent


def _num_served(comparison: Comparison) -> int:
    return int(np.count_nonzero(comparison.usable)) + int(np.count_nonzero(~comparison.renewed))
