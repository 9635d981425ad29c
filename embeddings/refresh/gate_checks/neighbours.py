"""Overlap of an item's nearest neighbours in the candidate with those in the served version."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.vectors.item_vectors import Array, chunks, unit_rows

_PURPOSE = 1  # key of the generator that samples all shared items


class Neighbours(GateCheck):
    """``knn_overlap``: mean share of an item's k nearest neighbours that are the same in both versions.

    Exact neighbours of ``num_queries`` evident items are searched among at most ``num_corpus`` items. A rotation does
    not change them. ``knn_overlap_all`` is the same share for all shared items. Neither metric has a limit by default.
    """

    about = "vectors"
    limits = (
        Limit("knn_overlap", None, "neighbours have changed: check that ids and rows belong together, and the data"),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        metrics = {"knn_overlap": _overlap(comparison, comparison.evident, comparison.generator)}
        if not comparison.all_evident:
            # More draws from the comparison's generator would change the draws of later checks.
            generator = np.random.Generator(np.random.Philox([comparison.sampling.seed, _PURPOSE]))
            metrics["knn_overlap_all"] = _overlap(comparison, comparison.shared, generator)
        return metrics


def _overlap(comparison: Comparison, rows: tuple[Array, Array], generator: np.random.Generator) -> float:
    (old, new), sampling = rows, comparison.sampling
    if len(old) > sampling.num_corpus:
        picked = np.sort(generator.choice(len(old), sampling.num_corpus, replace=False))
        old, new = old[picked], new[picked]
    k = min(sampling.k, len(old) - 1)
    if k < 1:
        return float("nan")
    queries = generator.choice(len(old), min(sampling.num_queries, len(old)), replace=False)
    before = _nearest(comparison.served.vectors[old], queries, k)
    after = _nearest(comparison.candidate.vectors[new], queries, k)
    return float((before[:, :, None] == after[:, None, :]).any(axis=2).mean())


def _nearest(vectors: Array, queries: Array, k: int) -> Array:
    directions = unit_rows(vectors)[0].astype(np.float32)
    nearest = np.empty((len(queries), k), dtype=np.int64)
    for part in chunks(len(queries), 100):
        cosines = directions[queries[part]] @ directions.T
        cosines[np.arange(len(cosines)), queries[part]] = -np.inf
        nearest[part] = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
    return nearest
