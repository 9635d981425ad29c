"""The gate: whether a candidate is close enough to what is served, a pure function of measurements and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Metrics = Mapping[str, float]

MOVED = (
    "the vectors moved more than a refresh moves them. Check that the run was warm-started from the current version "
    "(init_from), and its data; to serve it all the same, promote it with a reason and override_gate"
)
_GONE = "check that the data is whole and the ids are the same ones"
_OTHERS = "check that ids and rows belong together, and the data"
_NORMS = (
    "published directions are fine, but norms changed: check learning rate, decay and initial values; consumers that "
    "read norms would notice"
)
REMEDIES = {
    "finite": "the model diverged: lower the learning rate or look for broken input, then run again",
    "coverage": "live items have no vector: check the training data and the evidence of the rows, then run again",
    "missing": "items have never had a vector: check the training data, then run again",
    "carried": "most of what would be served is old: check that the window of the data has the items",
    "newly_carried": f"items that were there are gone: {_GONE}",
    "newly_carried_traffic": f"popular items are gone: {_GONE}",
    "effective_rank": (
        "the vectors have collapsed onto few directions: train longer, or with an init and a loss that "
        "determine the geometry (bpr, two_tower)"
    ),
    "knn_overlap": f"neighbours are others: {_OTHERS}",
    "kernel_rms": f"similarities changed: {_OTHERS}",
    "norm_shift": _NORMS,
    "norm_moved": _NORMS,
    "norm_outside": _NORMS,
    "canary_drop": "a consumer that is frozen like yours gets worse: look at the other metrics and at the data",
    "canary_churn": "a consumer that is frozen like yours changes its mind too often: look at the other metrics",
}

# What is judged from above; the others from below.
AT_MOST = frozenset(
    {
        "missing", "carried", "newly_carried", "newly_carried_traffic", "cosine_low", "cosine_low_traffic",
        "kernel_rms", "norm_shift", "norm_moved", "norm_outside", "canary_drop", "canary_churn",
    }
)  # fmt: skip


def base_of(metric: str) -> str:
    """Return ``cosine_p5[10-99]`` without its bucket, ``canary_churn[genre]`` without its task."""
    return metric.partition("[")[0]


LOWEST_RANK = 0.75
"""Of the starting limit of the effective rank: as far as a calibration may lower it."""


@dataclass(frozen=True)
class Thresholds:
    """Limits of the gate.

    The fields are starting values for vectors whose geometry the loss determines and that were refreshed from a warm
    start. A bucket's limits are wider: rare items move more, and a bucket has fewer of them. Norms are published beside
    directions and bind hardly before a calibration knows them. ``own``: limits of single metrics by their full name,
    from a calibration or a probe; they come first.
    """

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
    cosine_p5_traffic: float = 0.70
    cosine_low_traffic: float = 0.05
    bucket_cosine_mean: float = 0.75
    bucket_cosine_p5: float = 0.40
    bucket_cosine_low: float = 0.20
    knn_overlap: float = 0.25
    kernel_rms: float = 0.6
    norm_shift: float = 10.0
    norm_moved: float = 0.75
    norm_outside: float = 1.0
    own: Mapping[str, float] = field(default_factory=dict)

    def limit(self, metric: str, dim: float) -> float | None:
        """Return the limit of a metric, None for one that is not judged.

        Effective rank must reach max(4, d/4), or d/2 where d is below 8, whose vectors can hardly reach 4; a limit of
        one's own raises that, or lowers it by a quarter at most (docs/adr/0023).
        """
        own = self.own.get(metric)
        if metric == "effective_rank":
            least = max(4.0, dim / 4) if dim >= 8 else dim / 2
            return least if own is None else max(LOWEST_RANK * least, float(own))
        if own is not None:
            return float(own)
        name = f"bucket_{base_of(metric)}" if metric.startswith("cosine") and "[" in metric else metric
        limit = getattr(self, name, None)
        return float(limit) if isinstance(limit, (int, float)) else None

    def with_own(self, limits: Mapping[str, float]) -> Thresholds:
        """Return these thresholds with limits of single metrics put in their place."""
        return replace(self, own={**self.own, **limits})


@dataclass(frozen=True)
class Check:
    """One metric against its limit.

    ``verdict``: pass or fail; ``remedy``: what to do about a failure.
    """

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
        """The value that failed, and its limit."""
        if np.isnan(self.value):
            return f"{self.metric} cannot be measured (no such items)"
        return f"{self.metric} is {self.value:.4g}, {'above' if self.at_most else 'below'} {self.threshold:.4g}"

    def as_dict(self) -> dict[str, Any]:
        """Return {metric, value, threshold, bound, verdict, remedy}, for manifests and events.

        The value is None where it is not a number.
        """
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
    """All checks of a candidate.

    ``passed``: none failed. ``reasons``: what failed, one sentence for each remedy.
    """

    checks: tuple[Check, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return all(check.verdict == "pass" for check in self.checks)

    @property
    def failed(self) -> list[str]:
        """The names of the metrics that failed."""
        return [check.metric for check in self.checks if check.verdict == "fail"]

    @property
    def reasons(self) -> list[str]:
        findings: dict[str, list[str]] = {}
        for check in self.checks:
            if check.verdict == "fail":
                findings.setdefault(check.remedy, []).append(check.finding)
        return [f"{', '.join(found)}: {remedy}" for remedy, found in findings.items()]


def decide(metrics: Metrics, thresholds: Thresholds | None = None) -> Verdict:
    """Return the verdict on measurements of ``compare``: a check for each metric that has a limit.

    The verdict is a pure function of the arguments.
    """
    thresholds = thresholds or Thresholds()
    checks = []
    for name, value in metrics.items():
        limit = thresholds.limit(name, metrics.get("dim", float("nan")))
        if limit is not None:
            base = base_of(name)
            checks.append(Check(name, float(value), limit, base in AT_MOST, REMEDIES.get(base, MOVED)))
    return Verdict(tuple(checks))
