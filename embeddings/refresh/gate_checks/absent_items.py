"""Items that the candidate has no vector for."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, ratio, share
from embeddings.vectors.item_vectors import MISSING, Array, ItemVectors

RECENT_PUBLICATIONS = 7
"""Publications within which an item was found, to count in ``carried``."""
_GONE = "check that the data is whole and the ids are the same ones"


class Missing(GateCheck):
    """``missing``: share of all ids that would be served without a vector; it informs."""

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
    """What of the previous version the candidate has not, and what has come in its place.

    ``unreplaced`` holds: ``newly_carried``, the share of the items that the previous version had found
    and the candidate has not, less the items that the candidate alone has found, as a share of the same whole. The
    others inform.
    ``newly_carried_traffic`` and ``unreplaced_traffic`` are the same by counts. ``newly_carried_rise``: what
    ``newly_carried`` has risen since the previous version. ``carried``: share of old vectors in what would be served of
    the items that one of the last ``RECENT_PUBLICATIONS`` versions has found; ``carried_all``: of all items.

    Where items live for a day or two most of them are gone on the next: the items that took their place tell that from
    truncated data, and a rise above what is usual tells it from changed ids.

    A candidate of a share s < 1 of the days (``window_share``) cannot have the items of the others. So each item that
    has come counts ``Shorter.stands_for`` times, and by counts is halfway to a mean one that has gone; without a day of
    its own a candidate is asked for s of the items. ``newly_carried`` is of as many items as s of the previous rows
    would have if they were drawn at random: nearly all where items stay, too many where they live for a day. What an
    earlier version of more days has found counts as s items each in ``carried``.
    """

    about = "items"
    limits = (
        Limit(
            "unreplaced",
            0.5,
            f"items that were there are gone, and no others in their place: {_GONE}",
            at_most=True,
            spread=0.05,
        ),
        Limit(
            "unreplaced_traffic", None, f"popular items are gone, and no others in their place: {_GONE}", at_most=True
        ),
        Limit(
            "carried", None, "most of what would be served is old: check that the window has the items", at_most=True
        ),
        Limit("newly_carried", None, f"items that were there are gone: {_GONE}", at_most=True),
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
        num_recent = float(_weights(comparison)[is_carried & _is_recent(previous)].sum())
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
            # Their lives have only begun: their rows are taken halfway to those of as many that have gone.
            rows_of_new = (counts[arrived].sum() + num_new * previous.counts[lost].sum() / max(lost.sum(), 1)) / 2
            replaced = (stands_for or 0.0) * ratio(rows_of_new, had)
        elif counts is not None:
            replaced = ratio(counts[arrived].sum(), counts[comparison.usable].sum())
        metrics["unreplaced_traffic"] = max(0.0, metrics["newly_carried_traffic"] - replaced)
        if stands_for is None:
            metrics["unreplaced_traffic"] = min(metrics["unreplaced_traffic"], metrics["unreplaced"])
        return metrics


def _num_expected(comparison: Comparison) -> float:
    """Estimate the number of items that the previous version would have found in the window's share of its rows.

    The rows are drawn at random. An item without rows, which a tower knows of, needs none.
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


def _is_recent(previous: ItemVectors) -> Array:
    """Flag the previous version's items that it or one of those before it found, bool [its rows]."""
    if previous.carried_for is None:
        return np.ones(len(previous), dtype=np.bool_)
    recent: Array = previous.carried_for < RECENT_PUBLICATIONS
    return recent


def _num_served(comparison: Comparison) -> int:
    return int(np.count_nonzero(comparison.usable)) + int(np.count_nonzero(~comparison.renewed))
