"""The gate: a verdict on a candidate, as a pure function of measurements and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from embeddings.refresh.gate_checks.base import STANDARD_ERROR, Limit, Metrics, base_of
from embeddings.refresh.gate_checks.registry import limit_of
from embeddings.refresh.usual import MIN_REFRESHES, Usual


@dataclass(frozen=True)
class Limits:
    """Limits of the gate.

    Attributes:
        own: limits that a job sets, by the metric's full name or without the name in brackets; they take precedence.
        usual: usual values of the collection's published refreshes, by metric.
    """

    own: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, Usual] = field(default_factory=dict)

    def of(self, name: str, metrics: Metrics) -> float | None:
        """Return the limit of the metric ``name`` for a candidate with ``metrics``; None if it has no limit."""
        limit = limit_of(name)
        own = self.own.get(name, self.own.get(base_of(name)))
        if limit is None or own is not None:
            return own if limit is None else limit.binding(metrics, own)
        starting, usual = limit.binding(metrics, None), self.usual.get(name)
        if limit.spread is None or usual is None or (starting is not None and usual.refreshes < MIN_REFRESHES):
            return starting
        return usual.limit(limit.spread, metrics.get(standard_error_of(name), 0.0), limit.at_most)


def standard_error_of(name: str) -> str:
    """Return the name of the metric that holds a metric's standard error, such as ``canary_drop_se[genre]``."""
    base, bracket, group = name.partition("[")
    return f"{base}{STANDARD_ERROR}{bracket}{group}"


@dataclass(frozen=True)
class Check:
    """One metric compared with its limit.

    ``verdict`` is pass or fail, ``remedy`` the action to take on a failure, ``usual`` the metric's usual value in
    published refreshes.
    """

    metric: str
    value: float
    threshold: float
    at_most: bool
    remedy: str = ""
    usual: Usual | None = None

    @property
    def verdict(self) -> str:
        # NaN compares false, so a metric that could not be measured fails.
        held = self.value <= self.threshold if self.at_most else self.value >= self.threshold
        return "pass" if held else "fail"

    @property
    def times(self) -> float | None:
        """Distance from the usual or the best value, in units of what the limit allows; None if unknown."""
        value, limit = float(self.value), float(self.threshold)
        if not np.isfinite(value):
            return None
        if self.usual is not None and limit != self.usual.median:
            return (value - self.usual.median) / (limit - self.usual.median)
        if self.at_most or limit < 0:
            return value / limit if limit else None
        if limit <= 1:  # shares and cosines, whose best is 1
            return (1 - value) / (1 - limit) if limit < 1 else None
        return limit / value if value > 0 else None

    @property
    def finding(self) -> str:
        """The value that failed, and its limit."""
        if np.isnan(self.value):
            return f"{self.metric} cannot be measured (no such items)"
        usual = "" if self.usual is None else f" (usually {self.usual.median:.4g})"
        return f"{self.metric} is {self.value:.4g}, {'above' if self.at_most else 'below'} {self.threshold:.4g}{usual}"

    def as_dict(self) -> dict[str, Any]:
        """Return {metric, value, threshold, bound, verdict, remedy, usual}, for manifests and events.

        The value is None where it is not a number.
        """
        return {
            "metric": self.metric,
            "value": self.value if np.isfinite(self.value) else None,
            "threshold": self.threshold,
            "bound": "at_most" if self.at_most else "at_least",
            "verdict": self.verdict,
            "remedy": self.remedy if self.verdict == "fail" else "",
            "usual": None if self.usual is None else asdict(self.usual),
        }


@dataclass(frozen=True)
class Verdict:
    """All checks of a candidate.

    ``passed`` is True if no check failed. ``reasons`` lists the failed checks, one sentence for each remedy.
    """

    checks: tuple[Check, ...] = ()

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


def decide(metrics: Metrics, limits: Limits | None = None, remedies: Mapping[str, str] | None = None) -> Verdict:
    """Return the verdict on measurements of ``compare``: a check for each metric that has a limit.

    The verdict is a pure function of the arguments. ``remedies``: remedies that fit the job, by metric; they replace
    the limits' own.
    """
    limits = limits or Limits()
    checks = []
    for name, value in metrics.items():
        threshold = limits.of(name, metrics)
        if threshold is not None:
            limit = limit_of(name) or Limit(name, None)
            remedy = (remedies or {}).get(base_of(name), limit.remedy)
            checks.append(Check(name, float(value), threshold, limit.at_most, remedy, limits.usual.get(name)))
    return Verdict(tuple(checks))
