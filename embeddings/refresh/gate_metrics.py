"""How far a candidate's item vectors are from the served ones: what the gate (embeddings/refresh/gate.py) judges.

The candidate is the one already rotated onto the previous version and *not yet averaged* with it, because an average
hides faults. Neighbour overlap and kernel error do not change under a rotation, so they are blind to a skipped
alignment: the cosines are what shows it. Nor do directions show a change of norms, which are published beside them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from embeddings.refresh.gate import Check, Thresholds, Verdict, decide
from embeddings.vectors.item_vectors import FOUND, MISSING, Array, ItemVectors, chunks, shared_rows, unit_rows
from embeddings.vectors.lazy_rows import Vectors

__all__ = [
    "Check", "Metrics", "Thresholds", "Verdict", "compare", "cosines_of", "count_buckets", "decide", "effective_rank",
    "live_rows", "usable_rows",
]  # fmt: skip

LOW_COSINE = 0.65
MIN_BUCKET_ITEMS = 30
MIN_BUCKET_ITEMS_P5 = 200
MAX_BUCKETS = 6

Metrics = dict[str, float]


def compare(
    previous: ItemVectors | None,
    candidate: ItemVectors,
    *,
    seed: int = 0,
    k: int = 10,
    sigma: float = 0.4,
    num_queries: int = 500,
    num_corpus: int = 50_000,
    num_pairs: int = 20_000,
    live: Array | None = None,
) -> Metrics:
    """Measure an aligned ``candidate`` against the ``previous`` version.

    Always measured: ``dim``; ``rows``; ``finite``, share of rows without NaN or infinity; ``coverage``, share of live
    items that have a usable vector: evidence, finite, not zero; ``effective_rank``, exp of the entropy of the variance
    along the principal axes of the usable directions (Roy and Vetterli 2007, on eigenvalues), between 1 and d.

    Against a previous version: ``missing`` and ``carried``, shares of all ids that would be served without a vector,
    and with an old one; ``newly_carried`` and ``newly_carried_traffic``, share of the items that the previous version
    had found and this one has not, by items and by the previous counts; over the ``shared`` items, which both have
    found, ``cosine_mean``, ``cosine_p5``, ``cosine_low`` (share below .65), all three also weighted by counts
    (``cosine_mean_traffic``) and per decade of counts (``cosine_mean[10-99]``); ``knn_overlap``, mean share of the k
    nearest neighbours (exact, of ``num_queries`` items among at most ``num_corpus``) that are the same; ``kernel_rms``,
    the root mean square change of exp(-sigma^2 |d|^2 / 2) over random pairs in units of its spread; ``norm_shift``, the
    factor (at least 1) between the median norms; ``norm_moved``, share of items whose norm changed by more than a
    factor of 2 beyond that; ``norm_outside``, share of norms outside the range of the previous version (its .5th to
    99.5th percentile). What cannot be measured is NaN.

    Args:
        previous: the version that is served; None: the candidate is the first one, which needs none.
        candidate: the candidate, aligned and not yet averaged.
        seed: of the samples.
        k: the number of neighbours of ``knn_overlap``.
        sigma: of the kernel of ``kernel_rms``.
        num_queries: items whose neighbours are compared.
        num_corpus: the most items among which neighbours are sought.
        num_pairs: random pairs of ``kernel_rms``.
        live: bool [n], items of which ``coverage`` is a share; where left out those with a count, or with evidence
            where counts are unknown.

    Raises:
        ValueError: vectors of different dims.

    Example:
        >>> from embeddings.refresh.gate_metrics import compare
        >>> rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
        >>> served, candidate = ItemVectors(range(200), rows), ItemVectors(range(200), rows[:, ::-1].copy())
        >>> metrics = compare(served, candidate)
        >>> metrics["cosine_mean"] < 0.5, round(metrics["knn_overlap"], 2)  # the same geometry, in another basis
        (True, 1.0)
    """
    usable, finite = usable_rows(candidate)
    live = live_rows(candidate) if live is None else live
    metrics: Metrics = {
        "dim": float(candidate.dim),
        "rows": float(len(candidate)),
        "finite": _share(finite),
        "coverage": _share(usable[live]),
        "effective_rank": effective_rank(candidate.vectors, np.flatnonzero(usable)),
    }
    if previous is None:
        metrics["missing"] = _share(~usable)
        return metrics
    if previous.dim != candidate.dim:
        raise ValueError(f"the previous version has {previous.dim} coordinates, the candidate {candidate.dim}")

    old, new = shared_rows(previous.keys, candidate.keys)
    renewed = np.zeros(len(previous), dtype=np.bool_)
    renewed[old] = usable[new]
    without = ~usable
    without[new[previous.statuses[old] != MISSING]] = False
    num_served = int(np.count_nonzero(usable)) + int(np.count_nonzero(~renewed))
    num_missing = int(np.count_nonzero(without))
    metrics["missing"] = num_missing / max(num_missing + num_served, 1)
    metrics["carried"] = int(np.count_nonzero(~renewed)) / max(num_served, 1)
    found = previous.statuses == FOUND
    lost = found & ~renewed
    metrics["newly_carried"] = _ratio(np.count_nonzero(lost), np.count_nonzero(found))
    if previous.counts is not None and previous.counts[found].any():
        metrics["newly_carried_traffic"] = _ratio(previous.counts[lost].sum(), previous.counts[found].sum())

    both = usable[new] & found[old]
    old, new = old[both], new[both]
    metrics["shared"] = float(len(old))
    cosines = cosines_of(previous.vectors, candidate.vectors, old, new)
    metrics.update(_cosine_metrics(cosines, None if candidate.counts is None else candidate.counts[new]))
    generator = np.random.Generator(np.random.Philox(seed))
    metrics["knn_overlap"] = _knn_overlap(
        previous.vectors, candidate.vectors, old, new, generator, k, num_queries, num_corpus
    )
    metrics["kernel_rms"] = _kernel_rms(previous.vectors, candidate.vectors, old, new, generator, sigma, num_pairs)
    metrics.update(_norm_metrics(previous.norms[old], candidate.norms[new]))
    return metrics


def usable_rows(items: ItemVectors) -> tuple[Array, Array]:
    """Return (usable, finite), bool [n] each.

    Usable rows have evidence, are finite, and not zero, so that the row has a direction.
    """
    finite = np.empty(len(items), dtype=np.bool_)
    nonzero = np.empty(len(items), dtype=np.bool_)
    for part in chunks(len(items)):
        finite[part] = np.isfinite(items.vectors[part]).all(axis=1)
        nonzero[part] = items.vectors[part].any(axis=1)
    return items.evidence & finite & nonzero, finite


def live_rows(items: ItemVectors) -> Array:
    """Return which items training saw, bool [n]: with a count, or with evidence where counts are unknown."""
    live: Array = items.evidence if items.counts is None else items.counts > 0
    return live


def effective_rank(vectors: Vectors, rows: Array) -> float:
    """Return exp(-sum p log p), p the share of each principal axis (about the origin) in the variance.

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


def cosines_of(left: Vectors, right: Vectors, left_rows: Array, right_rows: Array) -> Array:
    """Return the cosine of each pair of rows, float64 [n]."""
    cosines = np.empty(len(left_rows))
    for part in chunks(len(left_rows)):
        cosines[part] = np.einsum(
            "nd,nd->n", unit_rows(left[left_rows[part]])[0], unit_rows(right[right_rows[part]])[0]
        )
    return cosines


def _cosine_metrics(cosines: Array, counts: Array | None) -> Metrics:
    nan = float("nan")
    metrics = {
        "cosine_mean": float(cosines.mean()) if len(cosines) else nan,
        "cosine_p5": float(np.percentile(cosines, 5)) if len(cosines) else nan,
        "cosine_low": _share(cosines < LOW_COSINE),
    }
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
            metrics[f"cosine_low[{name}]"] = _share(inside < LOW_COSINE)
        if len(inside) >= MIN_BUCKET_ITEMS_P5:
            metrics[f"cosine_p5[{name}]"] = float(np.percentile(inside, 5))
    return metrics


def count_buckets() -> list[tuple[str, int, float]]:
    """Return decades of counts, (name, from, below); items in training fewer than once belong to the first."""
    edges = [0, *(10**power for power in range(1, MAX_BUCKETS))]
    buckets = [(f"{low}-{high - 1}", low, float(high)) for low, high in itertools.pairwise(edges)]
    return [*buckets, (f"{edges[-1]}+", edges[-1], float("inf"))]


def _knn_overlap(
    left: Vectors,
    right: Vectors,
    left_rows: Array,
    right_rows: Array,
    generator: np.random.Generator,
    k: int,
    num_queries: int,
    num_corpus: int,
) -> float:
    if len(left_rows) > num_corpus:
        picked = np.sort(generator.choice(len(left_rows), num_corpus, replace=False))
        left_rows, right_rows = left_rows[picked], right_rows[picked]
    k = min(k, len(left_rows) - 1)
    if k < 1:
        return float("nan")
    queries = generator.choice(len(left_rows), min(num_queries, len(left_rows)), replace=False)
    before = _nearest(left[left_rows], queries, k)
    after = _nearest(right[right_rows], queries, k)
    return float((before[:, :, None] == after[:, None, :]).any(axis=2).mean())


def _nearest(vectors: Array, queries: Array, k: int) -> Array:
    directions = unit_rows(vectors)[0].astype(np.float32)
    nearest = np.empty((len(queries), k), dtype=np.int64)
    for part in chunks(len(queries), 100):
        cosines = directions[queries[part]] @ directions.T
        cosines[np.arange(len(cosines)), queries[part]] = -np.inf
        nearest[part] = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
    return nearest


def _kernel_rms(
    left: Vectors,
    right: Vectors,
    left_rows: Array,
    right_rows: Array,
    generator: np.random.Generator,
    sigma: float,
    num_pairs: int,
) -> float:
    if len(left_rows) < 2:
        return float("nan")
    first = generator.integers(len(left_rows), size=num_pairs)
    second = (first + generator.integers(1, len(left_rows), size=num_pairs)) % len(left_rows)
    kernels = []
    for vectors, rows in ((left, left_rows), (right, right_rows)):
        cosines = cosines_of(vectors, vectors, rows[first], rows[second])
        kernels.append(np.exp(-(sigma**2) * (1.0 - cosines)))
    return _ratio(np.sqrt(np.mean((kernels[1] - kernels[0]) ** 2)), kernels[0].std())


def _norm_metrics(before: Array, after: Array) -> Metrics:
    """Return metrics of the norms [n] of shared items.

    Items of norm zero, whose direction was carried from another version, do not count.
    """
    both = (before > 0) & (after > 0) & np.isfinite(before) & np.isfinite(after)
    if not both.any():
        return {"norm_shift": float("nan"), "norm_moved": float("nan"), "norm_outside": float("nan")}
    before, after = before[both].astype(np.float64), after[both].astype(np.float64)
    shift = float(np.median(after) / np.median(before))
    change = np.abs(np.log(after / before / shift))
    low, high = np.percentile(before, [0.5, 99.5])
    return {
        "norm_shift": max(shift, 1.0 / shift),
        "norm_moved": _share(change > np.log(2.0)),
        "norm_outside": _share((after < low) | (after > high)),
    }


def _share(mask: Array) -> float:
    return float(mask.mean()) if len(mask) else float("nan")


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else float("nan")
