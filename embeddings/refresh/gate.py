"""The gate: whether a candidate is close enough to what is served, a pure function of measurements and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embeddings.refresh.gate_checks.base import Limit, Metrics
from embeddings.refresh.gate_checks.registry import limit_of


@dataclass(frozen=True)
class Thresholds:
    """Limits of the gate: the starting ones of each check, and ``own`` ones of single metrics, which come first.

    The starting limits are for vectors whose geometry the loss determines and that were refreshed from a warm start.
    ``own`` ones, by the metric's full name, are from a calibration or an operator; ``canary_drop`` and the like without
    a name are of every probe that has none of its own.
    """

    own: Mapping[str, float] = field(default_factory=dict)

    def limit(self, metric: str, dim: float) -> float | None:
        """Return the limit of a metric of vectors of ``dim`` coordinates, None for one that is not judged."""
        own, limit = self.own.get(metric), limit_of(metric)
        if own is None and limit is not None and limit.starting is None:
            # Of every probe, where none is named.
            own = self.own.get(limit.metric)
        return own if limit is None else limit.binding(metric, dim, own)

    def with_own(self, limits: Mapping[str, float]) -> Thresholds:
        """Return these thresholds with limits of single metrics put in their place."""
        return Thresholds({**self.own, **limits})


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
        return [f"{', '.join(sentences)}: {remedy}" for remedy, sentences in findings.items()]


def decide(metrics: Metrics, thresholds: Thresholds | None = None) -> Verdict:
    """Return the verdict on measurements of ``compare``: a check for each metric that has a limit.

    The verdict is a pure function of the arguments.
    """
    thresholds = thresholds or Thresholds()
    checks = []
    for name, value in metrics.items():
        threshold = thresholds.limit(name, metrics.get("dim", float("nan")))
        if threshold is not None:
            limit = limit_of(name) or Limit(name, None)
            checks.append(Check(name, float(value), threshold, limit.at_most, limit.remedy))
    return Verdict(tuple(checks))
