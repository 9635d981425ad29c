"""Comparison of the served version's model with a candidate's, on rows that neither was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ALL_ROWS = "all"
"""Name of the slice that holds every row."""
NEWEST_ROWS = "newest"
"""Name of the slice that holds the newest fifth of a window's rows."""


@dataclass(frozen=True)
class ModelDifference:
    """One metric of both models on the same rows.

    Attributes:
        slice: ``all``, or COLUMN=VALUE of ``evaluation.slices``.
        rows: number of rows, or of users if the metric is a mean over users.
        low, high: ends of the interval of the improvement, in units of the metric; positive is better.
        popularity: the metric of a ranking only by popularity; None for metrics of labelled rows.
        lower_is_better: True for losses and errors.
        served_error, candidate_error: standard errors of ``served`` and ``candidate``; 0 if an earlier release made the
            comparison.
    """

    metric: str
    slice: str
    rows: int
    served: float
    candidate: float
    low: float
    high: float
    popularity: float | None = None
    lower_is_better: bool = False
    served_error: float = 0.0
    candidate_error: float = 0.0


@dataclass(frozen=True)
class ModelComparison:
    """Differences between the served model and a candidate's, on all rows first; or the reason why there are none."""

    version: str | None
    differences: tuple[ModelDifference, ...] = ()
    skipped: str = ""

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> ModelComparison:
        """Read the document that :meth:`as_json` wrote."""
        differences = tuple(ModelDifference(**difference) for difference in document["differences"])
        return cls(document["version"], differences, document["skipped"])

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as run directories, manifests and events have it."""
        return asdict(self) | {"differences": [asdict(difference) for difference in self.differences]}
