"""Checks of items for which the candidate has no vector."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, ratio, share
from embeddings.vectors.item_vectors import MISSING, Array

RECENT_PUBLICATIONS = 7
"""Number of latest publications; ``carried`` counts the items that were found in one of them."""
_GONE = "check that the data is complete and the ids are the same as before"


class Missing(GateCheck):
    """``missing``: share of all ids that would be served without a vector; it has no limit."""

    needs_previous = False
    limits = (Limit("missing", None, "items have never had a vector: check the training data", at_most=True),)

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
    """Items of the previous version that the candidate lacks, and new items in their place.

    Only ``unreplaced`` has a limit by default; the others inform.

    - ``newly_carried``: share of the items found in the previous version that are not found in the candidate.
    - ``unreplaced``: ``newly_carried`` less the items found only in the candidate, as a share of the same total.
    - ``newly_carried_traffic``, ``unreplaced_traffic``: the same, weighted by the items' counts.
    - ``newly_carried_rise``: rise of ``newly_carried`` since the previous version.
    - ``carried``: share of carried vectors among the items to be served that were found in one of the last
      ``RECENT_PUBLICATIONS`` versions; ``carried_all``: the same among all items.

    If items live for a day or two, most are gone in the next version. New items in their place distinguish that from
    truncated data, and a rise above the usual value reveals changed ids.

    A candidate that was trained on a share s < 1 of the days (``window_share``) cannot have the items of the other
    days. So each new item counts ``Shorter.stands_for`` times, and its number of rows is averaged with the mean of the
    items that are gone. A candidate without a new day is expected to have a share s of the items. ``newly_carried`` is
    then relative to the number of items in a random share s of the previous rows: nearly all items if items stay, and
    too many if they live for a day. In ``carried`` an item found in an earlier version of more days counts as s items.
    """

    about = "items"
    limits = (
        Limit("unreplaced", 0.5, f"items are gone, and no new ones replace them: {_GONE}", at_most=True, spread=0.05),
        Limit(
            "unreplaced_traffic", None, f"popular items are gone, and no new ones replace them: {_GONE}", at_most=True
        ),
        Limit(
            "carried", None, "most of what would be served is old: check that the window has the items", at_most=True
        ),
        Limit("newly_carried", None, f"items of the previous version are gone: {_GONE}", at_most=True),
        Limit(
            "newly_carried_rise", None, f"many more items are gone than in the refresh before: {_GONE}", at_most=True
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        previous, candidate = comparison.served, comparison.candidate
        is_carried = ~comparison.renewed
        had_vector = previous.renewed
        num_found, num_shared = int(np.count_nonzero(comparison.usable)), len(comparison.shared[0])
        num_had, num_expected = int(np.count_nonzero(had_vector)), _num_expected(comparison)
        num_new = num_found - num_shared
        is_recent = True if previous.carried_for is None else previous.carried_for < RECENT_PUBLICATIONS
        num_recent = float(_weights(comparison)[is_carried & is_recent].sum())
        stands_for = comparison.shorter.stands_for
        # NaN where nothing had been found.
        newly_carried = float(np.maximum(ratio(num_expected - num_shared, num_expected), 0.0))
        if stands_for is None:
            unreplaced = 1.0 - ratio(num_found, comparison.shorter.share * num_had)
        else:
            unreplaced = ratio(num_had - num_shared - stands_for * num_new, num_had)
        metrics = {
            "carried": num_recent / max(num_found + num_recent, 1),
            "carried_all": int(np.count_nonzero(is_carried)) / max(_num_served(comparison), 1),
            "newly_carried": newly_carried,
            "unreplaced": max(0.0, unreplaced),
        }
        if comparison.shorter.share < 1.0:
            metrics["window_share"] = comparison.shorter.share
        before = comparison.metrics_before.get("newly_carried")
        if before is not None:
            metrics["newly_carried_rise"] = newly_carried - before
        if previous.counts is None or not previous.counts[had_vector].any():
            return metrics
        lost, had = had_vector & is_carried, previous.counts[had_vector].sum()
        metrics["newly_carried_traffic"] = ratio(previous.counts[lost].sum(), had)
        arrived = comparison.usable.copy()
        arrived[comparison.shared[1]] = False
        replaced, counts = 0.0, candidate.counts
        if counts is not None and comparison.shorter.share < 1.0:
            # New items have few rows as yet: take the mean of their rows and of those of equally many removed items.
            rows_of_new = (counts[arrived].sum() + num_new * previous.counts[lost].sum() / max(lost.sum(), 1)) / 2
            replaced = (stands_for or 0.0) * ratio(rows_of_new, had)
        elif counts is not None:
            replaced = ratio(counts[arrived].sum(), counts[comparison.usable].sum())
        metrics["unreplaced_traffic"] = max(0.0, metrics["newly_carried_traffic"] - replaced)
        if stands_for is None:
            metrics["unreplaced_traffic"] = min(metrics["unreplaced_traffic"], metrics["unreplaced"])
        return metrics


def _num_expected(comparison: Comparison) -> float:
    """Estimate the number of the previous version's items that occur in a share of its rows as large as the window.

    The rows are drawn at random. An item without rows, whose vector a tower computes, always counts.
    """
    previous, part = comparison.served, comparison.shorter.share
    num_had = int(np.count_nonzero(previous.renewed))
    if part == 1.0:
        return num_had
    if previous.counts is None:
        return part * num_had
    counts = previous.counts[previous.renewed]
    return float(np.where(counts > 0, 1.0 - (1.0 - part) ** counts, 1.0).sum())


def _weights(comparison: Comparison) -> Array:
    """Weigh each item of the previous version as if all versions had the candidate's days."""
    shares, ages = np.asarray(comparison.shorter.shares, dtype=np.float64), comparison.served.carried_for
    if ages is None:
        return np.full(len(comparison.served), comparison.shorter.share)
    weights = np.ones(len(ages))
    known = ages < len(shares)
    weights[known] = shares[ages[known]]
    return weights


def _num_served(comparison: Comparison) -> int:
    return int(np.count_nonzero(comparison.usable)) + int(np.count_nonzero(~comparison.renewed))
