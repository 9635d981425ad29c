"""Interface of the gate's checks: a measurement, and the limits of its metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from embeddings.refresh.gate_checks.comparison import Comparison

Metrics = Mapping[str, float]
Subject = Literal["items", "vectors", "run", "rows", "model"]

STANDARD_ERROR = "_se"
"""Suffix of the metric that holds the standard error of another metric."""
MOVED = (
    "the vectors moved more than this collection's refreshes move them. Check that the run was warm-started from the "
    "current version (init_from), and its data; to serve it all the same, promote it with a reason and override_gate"
)


def base_of(metric: str) -> str:
    """Return a metric's name without the brackets: ``canary_drop`` for ``canary_drop[genre]``."""
    return metric.partition("[")[0]


@dataclass(frozen=True)
class Limit:
    """The limit of one metric.

    Attributes:
        metric: name, without the probe or slice in brackets.
        starting: limit while fewer than ``MIN_REFRESHES`` refreshes were published; None: the metric is only
            reported, unless the job sets a limit for it.
        at_most: True where large values are bad.
        spread: least day-to-day standard deviation that rolling limits assume; None: the starting limit stays.
        about: subject of a failure; None: that of the check.
    """

    metric: str
    starting: float | None
    remedy: str = MOVED
    at_most: bool = False
    spread: float | None = None
    about: Subject | None = None

    def starting_for(self, metrics: Metrics) -> float | None:
        """Return the starting limit for a candidate with these metrics."""
        return self.starting

    def binding(self, metrics: Metrics, own: float | None) -> float | None:
        """Return the limit that applies, given a job's ``own``; None if there is neither."""
        return self.starting_for(metrics) if own is None else float(own)


class GateCheck(ABC):
    """One measurement of a candidate, and the limits outside which the gate holds the candidate."""

    limits: ClassVar[tuple[Limit, ...]]
    about: ClassVar[Subject] = "run"
    """Subject of a failure: ``items``, the set of items with rows; ``vectors``, their movement; ``rows``, the training
    rows; ``model``, its quality; ``run``, an output that must not be served."""
    needs_previous: ClassVar[bool] = True
    """False if a collection's first version is measured too."""

    @staticmethod
    @abstractmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        """Return metrics, keyed by name; NaN stands for a metric that cannot be measured, and fails its limit."""
