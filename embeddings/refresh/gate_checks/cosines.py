"""How far the directions of items turned."""

from __future__ import annotations

import itertools

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, share
from embeddings.vectors.item_vectors import Array, chunks, unit_rows
from embeddings.vectors.lazy_rows import Vectors

LOW_COSINE = 0.65
MIN_BUCKET_ITEMS = 30
MIN_BUCKET_ITEMS_P5 = 200
MAX_BUCKETS = 6


class Cosines(GateCheck):
    """Cosines of the items that both versions have found to their vectors before.

    ``cosine_mean``, ``cosine_p5``, ``cosine_low`` (share below .65), all three also weighted by counts
    (``cosine_mean_traffic``) and per decade of counts (``cosine_mean[10-99]``): of the ``evident`` items among the
    ``shared`` ones. The first three are also told of all shared items (``cosine_mean_all``), without a limit.

    A model that moves more than the starting values by chance is not stable enough to be published without a warm
    start, so no null makes those over all items looser.
    """

    about = "vectors"
    limits = (
        Limit("cosine_mean", 0.85, starting_in_group=0.75, calibrated=Calibrated(1.0, 0.02, 0.05, loosest=1.0)),
        Limit("cosine_p5", 0.70, starting_in_group=0.40, calibrated=Calibrated(1.0, 0.05, 0.10, loosest=1.0)),
        Limit(
            "cosine_low",
            0.05,
            at_most=True,
            starting_in_group=0.20,
            calibrated=Calibrated(1.0, 0.005, 0.03, loosest=1.0),
        ),
        Limit("cosine_mean_traffic", 0.85, calibrated=Calibrated(1.0, 0.02, loosest=1.0)),
        Limit("cosine_p5_traffic", 0.70, calibrated=Calibrated(1.0, 0.05, loosest=1.0)),
        Limit("cosine_low_traffic", 0.05, at_most=True, calibrated=Calibrated(1.0, 0.005, loosest=1.0)),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        served, candidate, (old, new) = comparison.served, comparison.candidate, comparison.evident
        cosines = cosines_of(served.vectors, candidate.vectors, old, new)
        counts = None if candidate.counts is None else candidate.counts[new]
        metrics = {"shared": float(len(comparison.shared[0])), **_cosine_metrics(cosines, counts)}
        if not comparison.all_evident:
            of_all = cosines_of(served.vectors, candidate.vectors, *comparison.shared)
            metrics["evident"] = float(len(old))
            metrics |= {f"{name}_all": value for name, value in _plain_metrics(of_all).items()}
        return metrics


def cosines_of(left: Vectors, right: Vectors, left_rows: Array, right_rows: Array) -> Array:
    """Return the cosine of each pair of rows, float64 [n]."""
    cosines = np.empty(len(left_rows))
    for part in chunks(len(left_rows)):
        cosines[part] = np.einsum(
            "nd,nd->n", unit_rows(left[left_rows[part]])[0], unit_rows(right[right_rows[part]])[0]
        )
    return cosines


def _plain_metrics(cosines: Array) -> dict[str, float]:
    nan = float("nan")
    return {
        "cosine_mean": float(cosines.mean()) if len(cosines) else nan,
        "cosine_p5": float(np.percentile(cosines, 5)) if len(cosines) else nan,
        "cosine_low": share(cosines < LOW_COSINE),
    }


def _cosine_metrics(cosines: Array, counts: Array | None) -> dict[str, float]:
    metrics = _plain_metrics(cosines)
    if counts is None:
        return metrics
    weight = float(counts.sum())
    if weight > 0:
        shares = counts / weight
        order = np.argsort(cosines)
        rank = int(np.searchsorted(np.cumsum(shares[order]), 0.05))
        metrics["cosine_mean_traffic"] = float(np.sum(cosines * shares))
        metrics["cosine_p5_traffic"] = float(cosines[order[min(rank, len(order) - 1)]])
        metrics["cosine_low_traffic"] = float(np.sum(shares[cosines < LOW_COSINE]))
    for name, low, high in count_buckets():
        inside = cosines[(counts >= low) & (counts < high)]
        if len(inside) >= MIN_BUCKET_ITEMS:
            metrics[f"cosine_mean[{name}]"] = float(inside.mean())
            metrics[f"cosine_low[{name}]"] = share(inside < LOW_COSINE)
        if len(inside) >= MIN_BUCKET_ITEMS_P5:
            metrics[f"cosine_p5[{name}]"] = float(np.percentile(inside, 5))
    return metrics


def count_buckets() -> list[tuple[str, int, float]]:
    """Return decades of counts, (name, from, below); items in training fewer than once belong to the first."""
    edges = [0, *(10**power for power in range(1, MAX_BUCKETS))]
    buckets = [(f"{low}-{high - 1}", low, float(high)) for low, high in itertools.pairwise(edges)]
    return [*buckets, (f"{edges[-1]}+", edges[-1], float("inf"))]
