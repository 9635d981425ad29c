"""Cosines between served and candidate vectors: how far the directions of items turned."""

from __future__ import annotations

import math

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison, share
from embeddings.vectors.item_vectors import Array, chunks, unit_rows
from embeddings.vectors.lazy_rows import Vectors

LOW_COSINE = 0.65
"""Cosine to its served vector below which an item counts as turned, by more than 49 degrees."""
MAX_TRAFFIC = 0.01
"""Largest share of the weight that one item has in traffic-weighted figures, so that no single item decides them."""


class Cosines(GateCheck):
    """Cosines between the candidate's and the served vector of each item with enough rows in both.

    ``cosine_mean``: their mean; ``cosine_low``: the share of items that turned. Both have limits, which allow for their
    standard errors. ``cosine_p5`` and ``cosine_mean_traffic`` (weighted by training rows) have no limits and are only
    reported, like the figures over all shared items (``cosine_mean_all``, ...).
    """

    about = "vectors"
    limits = (
        Limit("cosine_mean", 0.75, spread=0.01),
        Limit("cosine_low", 0.20, at_most=True, spread=0.005),
        Limit("cosine_p5", None),
        Limit("cosine_mean_traffic", None),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        served, candidate, (old, new) = comparison.served, comparison.candidate, comparison.evident
        cosines = cosines_of(served.vectors, candidate.vectors, old, new)
        metrics = {"shared": float(len(comparison.shared[0])), **_figures(cosines)}
        if len(cosines) > 1:
            low = metrics["cosine_low"]
            metrics["cosine_mean_se"] = float(cosines.std(ddof=1)) / math.sqrt(len(cosines))
            metrics["cosine_low_se"] = math.sqrt(low * (1.0 - low) / len(cosines))
        if candidate.counts is not None and candidate.counts[new].any():
            weights = capped(candidate.counts[new].astype(np.float64))
            metrics["cosine_mean_traffic"] = float(cosines @ weights)
        if not comparison.all_evident:
            of_all = cosines_of(served.vectors, candidate.vectors, *comparison.shared)
            metrics["evident"] = float(len(old))
            metrics |= {f"{name}_all": value for name, value in _figures(of_all).items()}
        return metrics


def cosines_of(left: Vectors, right: Vectors, left_rows: Array, right_rows: Array) -> Array:
    """Return the cosine of each pair of rows, float64 [n]."""
    cosines = np.empty(len(left_rows))
    for part in chunks(len(left_rows)):
        cosines[part] = np.einsum(
            "nd,nd->n", unit_rows(left[left_rows[part]])[0], unit_rows(right[right_rows[part]])[0]
        )
    return cosines


def capped(counts: Array) -> Array:
    """Return weights [n] that sum to 1, proportional to ``counts`` but for items that would exceed ``MAX_TRAFFIC``."""
    largest = max(MAX_TRAFFIC, 1.0 / len(counts))
    weights = counts / counts.sum()
    for _ in range(len(counts)):
        above = weights > largest
        if not above.any():
            break
        rest = weights[~above].sum()
        weights[above] = largest
        if rest <= 0:
            weights = np.full(len(weights), 1.0 / len(weights))
            break
        weights[~above] *= (1.0 - largest * np.count_nonzero(above)) / rest
        if (weights <= largest * (1 + 1e-12)).all():
            break
    return weights / weights.sum()


def _figures(cosines: Array) -> dict[str, float]:
    nan = float("nan")
    return {
        "cosine_mean": float(cosines.mean()) if len(cosines) else nan,
        "cosine_p5": float(np.percentile(cosines, 5)) if len(cosines) else nan,
        "cosine_low": share(cosines < LOW_COSINE),
    }
