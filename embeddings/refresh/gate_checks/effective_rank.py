"""Effective rank: the number of directions over which the vectors spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit, Metrics
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.vectors.item_vectors import Array, chunks, unit_rows
from embeddings.vectors.lazy_rows import Vectors


def effective_rank(vectors: Vectors, rows: Array) -> float:
    """Return exp(-sum p log p), where p is each principal axis's share of the variance (about the origin).

    The variance is that of unit(vectors[rows]).
    """
    if not len(rows):
        return float("nan")
    gram = np.zeros((vectors.shape[1], vectors.shape[1]))
    for part in chunks(len(rows)):
        directions, _ = unit_rows(vectors[rows[part]])
        gram += directions.T @ directions
    shares = np.clip(np.linalg.eigvalsh(gram), 0.0, None)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


@dataclass(frozen=True)
class RankLimit(Limit):
    """max(4, d/4), or d/2 for d below 8, as such vectors can hardly reach 4; a job's own limit replaces it."""

    def starting_for(self, metrics: Metrics) -> float | None:
        dim = metrics.get("dim", float("nan"))
        return max(4.0, dim / 4) if dim >= 8 else dim / 2


class EffectiveRank(GateCheck):
    """``effective_rank``: exp of the entropy of the variance along the principal axes of the usable directions.

    It lies between 1 and d (Roy and Vetterli 2007, on eigenvalues).
    """

    needs_previous = False
    limits = (
        RankLimit(
            "effective_rank",
            None,
            "the vectors lie along few directions: train longer, or with a loss that determines their geometry",
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        usable = np.flatnonzero(comparison.usable)
        return {"effective_rank": effective_rank(comparison.candidate.vectors, usable)}
