"""How far a candidate's item vectors are from those that are served, and whether that is close enough to publish.

``compare`` measures, ``decide`` judges: a pure function of the measurements and of thresholds. The candidate is the one
already rotated onto the previous version and *not yet averaged* with it, because an average hides faults.
Neighbour overlap and kernel error do not change under a rotation, so they are blind to a skipped alignment: the cosines
are what shows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from embeddings.vectors import FOUND, MISSING, Array, ItemVectors, chunks, shared_rows, unit_rows

LOW_COSINE = 0.65
MIN_BUCKET_ITEMS = 30
MIN_BUCKET_ITEMS_P5 = 200
MAX_BUCKETS = 6

Metrics = dict[str, float]


# --- measuring -------------------------------------------------------------------------------------------------------


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
    """Measurements of an aligned ``candidate`` against the ``previous`` version (None: the first one, which needs
    none).

    Always: ``dim``; ``rows``; ``finite``, share of rows without NaN or infinity; ``coverage``, share of live items
    (bool [n] ``live``; where left out those with a count, or with evidence where counts are unknown) that have a usable
    vector: evidence, finite, not zero; ``effective_rank``, exp of the entropy of the variance along the principal axes
    of the usable directions (Roy and Vetterli 2007, on eigenvalues), between 1 and d. Against a previous version:
    ``missing`` and ``carried``, shares of all ids that would be served without a vector, and with an old one;
    ``newly_carried`` and ``newly_carried_traffic``, share of the items that the previous version had found and this one
    has not, by items and by the previous counts; over the ``shared`` items, which both have found, ``cosine_mean``,
    ``cosine_p5``, ``cosine_low`` (share below .65), ``cosine_mean_traffic`` (weighted by counts), the first three also
    per decade of counts as ``cosine_mean[10-99]``; ``knn_overlap``, mean share of the k nearest neighbours (exact, of
    ``num_queries`` items among at most ``num_corpus``) that are the same; ``kernel_rms``, the root mean square change
    of exp(-sigma^2 |d|^2 / 2) over random pairs in units of its spread. Samples are drawn with ``seed``. What cannot be
    measured is NaN. Raises ValueError for vectors of different dims.
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
    return metrics


def usable_rows(items: ItemVectors) -> tuple[Array, Array]:
    """(usable, finite), bool [n] each. Usable: evidence, finite, and not zero, so that the row has a direction."""
    finite = np.empty(len(items), dtype=np.bool_)
    nonzero = np.empty(len(items), dtype=np.bool_)
    for part in chunks(len(items)):
        finite[part] = np.isfinite(items.vectors[part]).all(axis=1)
        nonzero[part] = items.vectors[part].any(axis=1)
    return items.evidence & finite & nonzero, finite


def live_rows(items: ItemVectors) -> Array:
    """Items that training saw, bool [n]: with a count, or with evidence where counts are unknown."""
    live: Array = items.evidence if items.counts is None else items.counts > 0
    return live


def effective_rank(vectors: Array, rows: Array) -> float:
    """exp(-sum p log p), p the share of each principal axis (about the origin) in the variance of
    unit(vectors[rows])."""
    if not len(rows):
        return float("nan")
    gram = np.zeros((vectors.shape[1], vectors.shape[1]))
    for part in chunks(len(rows)):
        directions, _ = unit_rows(vectors[rows[part]])
        gram += directions.T @ directions
    shares = np.clip(np.linalg.eigvalsh(gram), 0.0, None)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


def cosines_of(left: Array, right: Array, left_rows: Array, right_rows: Array) -> Array:
    """Cosine of each pair of rows, float64 [n]."""
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
        metrics["cosine_mean_traffic"] = float(np.sum(cosines * (counts / weight)))
    for name, low, high in count_buckets():
        inside = cosines[(counts >= low) & (counts < high)]
        if len(inside) >= MIN_BUCKET_ITEMS:
            metrics[f"cosine_mean[{name}]"] = float(inside.mean())
            metrics[f"cosine_low[{name}]"] = _share(inside < LOW_COSINE)
        if len(inside) >= MIN_BUCKET_ITEMS_P5:
            metrics[f"cosine_p5[{name}]"] = float(np.percentile(inside, 5))
    return metrics


def count_buckets() -> list[tuple[str, int, float]]:
    """Decades of counts: (name, from, below). Items in training fewer than once belong to the first."""
    edges = [0, *(10**power for power in range(1, MAX_BUCKETS))]
    buckets = [(f"{low}-{high - 1}", low, float(high)) for low, high in itertools.pairwise(edges)]
    return [*buckets, (f"{edges[-1]}+", edges[-1], float("inf"))]


def _knn_overlap(
    left: Array,
    right: Array,
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
    left: Array,
    right: Array,
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


def _share(mask: Array) -> float:
    return float(mask.mean()) if len(mask) else float("nan")


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else float("nan")


# --- judging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """Limits of the gate. The defaults are starting values for vectors whose geometry the loss determines and that were
    refreshed from a warm start; ``calibrated`` puts a collection's own in their place. A bucket's limits are wider:
    rare items move more, and a bucket has fewer of them."""

    finite: float = 1.0
    coverage: float = 0.95
    missing: float = 0.5
    carried: float = 0.9
    newly_carried: float = 0.5
    newly_carried_traffic: float = 0.5
    cosine_mean: float = 0.85
    cosine_p5: float = 0.70
    cosine_low: float = 0.05
    cosine_mean_traffic: float = 0.85
    bucket_cosine_mean: float = 0.75
    bucket_cosine_p5: float = 0.40
    bucket_cosine_low: float = 0.20
    knn_overlap: float = 0.25
    kernel_rms: float = 0.6

    def calibrated(self, nulls: Sequence[Mapping[str, float]]) -> Thresholds:
        """These thresholds tightened by at least 3 null retrains, metrics of ``compare`` between trainings that differ
        by chance alone: mean - .02, 5th percentile - .05, share below .65 + .5 %, .9 of the overlap, 1.2 of the kernel
        error, never below the cosine floors of these. Raises ValueError for fewer."""
        if len(nulls) < 3:
            raise ValueError(f"{len(nulls)} null retrains: at least 3 are needed to calibrate a gate")
        null = {name: float(np.mean([metrics[name] for metrics in nulls])) for name in nulls[0]}
        return replace(
            self,
            cosine_mean=max(self.cosine_mean, null["cosine_mean"] - 0.02),
            cosine_p5=max(self.cosine_p5, null["cosine_p5"] - 0.05),
            cosine_low=min(self.cosine_low, null["cosine_low"] + 0.005),
            knn_overlap=0.9 * null["knn_overlap"],
            kernel_rms=1.2 * null["kernel_rms"],
        )


@dataclass(frozen=True)
class Check:
    """One metric against its limit. ``verdict``: pass or fail; ``remedy``: what to do about a failure."""

    metric: str
    value: float
    threshold: float
    at_most: bool
    remedy: str = ""

    @property
    def verdict(self) -> str:
        # NaN compares false: what could not be measured fails.
        held = self.value <= self.threshold if self.at_most else self.value >= self.threshold
        return "pass" if held else "fail"

    @property
    def finding(self) -> str:
        """What a failure found: value and limit."""
        if np.isnan(self.value):
            return f"{self.metric} cannot be measured (no such items)"
        return f"{self.metric} is {self.value:.4g}, {'above' if self.at_most else 'below'} {self.threshold:.4g}"

    def as_dict(self) -> dict[str, Any]:
        """For manifests and events: {metric, value, threshold, verdict, remedy}; value None where it is not a
        number."""
        return {
            "metric": self.metric,
            "value": self.value if np.isfinite(self.value) else None,
            "threshold": self.threshold,
            "bound": "at_most" if self.at_most else "at_least",
            "verdict": self.verdict,
            "remedy": self.remedy if self.verdict == "fail" else "",
        }


@dataclass(frozen=True)
class Verdict:
    """All checks. ``passed``: none failed. ``reasons``: what failed, one sentence for each remedy."""

    checks: tuple[Check, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return all(check.verdict == "pass" for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        findings: dict[str, list[str]] = {}
        for check in self.checks:
            if check.verdict == "fail":
                findings.setdefault(check.remedy, []).append(check.finding)
        return [f"{', '.join(found)}: {remedy}" for remedy, found in findings.items()]


_AT_MOST = {
    "missing", "carried", "newly_carried", "newly_carried_traffic", "cosine_low", "kernel_rms", "bucket_cosine_low",
}  # fmt: skip
_MOVED = (
    "the vectors moved more than a refresh moves them. Check that the run was warm-started from the current version "
    "(init_from), and its data; to serve it all the same, promote it with a reason and override_gate"
)
_REMEDIES = {
    "finite": "the model diverged: lower the learning rate or look for broken input, then run again",
    "coverage": "live items have no vector: check the training data and the evidence of the rows, then run again",
    "missing": "items have never had a vector: check the training data, then run again",
    "carried": "most of what would be served is old: check that the window of the data has the items",
    "newly_carried": "items that were there are gone: check that the data is whole and the ids are the same ones",
    "newly_carried_traffic": "popular items are gone: check that the data is whole and the ids are the same ones",
    "effective_rank": (
        "the vectors have collapsed onto few directions: train longer, or with an init and a loss that "
        "determine the geometry (bpr, two_tower)"
    ),
    "knn_overlap": "neighbours are others: check that ids and rows belong together, and the data",
    "kernel_rms": "similarities changed: check that ids and rows belong together, and the data",
}


def decide(metrics: Mapping[str, float], thresholds: Thresholds | None = None) -> Verdict:
    """The verdict on measurements of ``compare``: a check for each metric that has a limit. Effective rank must reach
    max(4, d/4), or d/2 where d is below 8, whose vectors can hardly reach 4. Pure."""
    thresholds = thresholds or Thresholds()
    checks = []
    for name, value in metrics.items():
        base, bracket, _ = name.partition("[")
        limit_name = f"bucket_{base}" if bracket else base
        if base == "effective_rank":
            dim = metrics["dim"]
            limit = max(4.0, dim / 4) if dim >= 8 else dim / 2
        elif hasattr(thresholds, limit_name):
            limit = getattr(thresholds, limit_name)
        else:
            continue
        checks.append(Check(name, float(value), float(limit), limit_name in _AT_MOST, _REMEDIES.get(base, _MOVED)))
    return Verdict(tuple(checks))
