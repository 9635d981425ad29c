"""The gate of one collection: what is measured of a candidate, by which limits it is judged, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embeddings.refresh.gate import Check, Thresholds, Verdict, decide
from embeddings.refresh.gate_checks.base import Metrics
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.gate_metrics import measure

if TYPE_CHECKING:
    from embeddings.store import Collection


@dataclass(frozen=True)
class Assessment:
    """A verdict on metrics.

    ``record`` is for the manifest: which probes took part.
    """

    verdict: Verdict
    metrics: Metrics
    record: dict[str, Any]


def assess(
    collection: Collection,
    comparison: Comparison,
    *,
    model: str = "",
    thresholds: Thresholds | None = None,
    limits: Mapping[str, float] | None = None,
    checks: tuple[Check, ...] = (),
) -> Assessment:
    """Measure an aligned candidate against the version that is served, and judge it.

    Args:
        collection: whose candidate it is.
        comparison: the candidate, that version, and the collection's probes that can read both.
        model: the candidate's model family.
        thresholds: limits; left out: the starting ones.
        limits: limits of single metrics, which are put in the place of those.
        checks: what was checked before; they come first in the verdict.
    """
    metrics = measure(comparison)
    if thresholds is None:
        thresholds = Thresholds()
    # Limits of distances between versions mean nothing to a version that has none before it.
    if limits and comparison.previous is not None:
        thresholds = thresholds.with_own(limits)
    record: dict[str, Any] = {"canaries": sorted(comparison.probes)}
    return Assessment(Verdict((*checks, *decide(metrics, thresholds).checks)), metrics, record)
