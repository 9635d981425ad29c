"""Metrics of a candidate's item vectors against the served vectors, for the gate (embeddings/refresh/gate.py) to judge.

The candidate has been rotated onto the previous version and is *not yet averaged* with it, because an average hides
faults. Neighbour overlap does not change under a rotation, so a skipped alignment shows only in the cosines. Neither
shows a change of norms, which are published along with directions.
"""

from __future__ import annotations

from typing import Any

from embeddings.refresh.gate_checks.comparison import Comparison, Sampling, live_rows
from embeddings.refresh.gate_checks.registry import CHECKS
from embeddings.vectors.item_vectors import Array, ItemVectors


def compare(
    previous: ItemVectors | None, candidate: ItemVectors, *, live: Array | None = None, **sampling: Any
) -> dict[str, float]:
    """Measure an aligned ``candidate`` against the ``previous`` version: all metrics of ``gate_checks.registry``.

    Args:
        previous: the version that is served; None: the candidate is the first version.
        candidate: the candidate, aligned and not yet averaged.
        live: bool [n], items that count for ``coverage``. Default: items with a count, or with evidence if counts
            are unknown.
        sampling: fields of :class:`embeddings.refresh.gate_checks.comparison.Sampling`.

    Returns:
        Metrics, keyed by name; NaN for a metric that cannot be measured.

    Raises:
        ValueError: vectors of different dims.

    Example:
        >>> import numpy as np
        >>> from embeddings.refresh.gate_metrics import compare
        >>> from embeddings.vectors.item_vectors import ItemVectors
        >>> rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
        >>> served, candidate = ItemVectors(range(200), rows), ItemVectors(range(200), rows[:, ::-1].copy())
        >>> metrics = compare(served, candidate)
        >>> metrics["cosine_mean"] < 0.5, round(metrics["knn_overlap"], 2)  # the same geometry, in another basis
        (True, 1.0)
    """
    live = live_rows(candidate) if live is None else live
    return measure(Comparison(previous, candidate, live, sampling=Sampling(**sampling)))


def measure(comparison: Comparison) -> dict[str, float]:
    """Return the metrics of every check, in the registry's order."""
    metrics: dict[str, float] = {}
    for check in CHECKS:
        if comparison.previous is not None or not check.needs_previous:
            metrics.update(check.measure(comparison))
    return metrics
