"""The gate of one collection: what is measured of a candidate, by which limits it is judged, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from embeddings.refresh.gate import Check, Limits, Verdict, decide
from embeddings.refresh.gate_checks.base import Metrics
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.gate_metrics import measure
from embeddings.refresh.usual import usual_metrics

if TYPE_CHECKING:
    from embeddings.store import Collection


@dataclass(frozen=True)
class Assessment:
    """A verdict on metrics, and the names of the probes that took part; None where nothing was measured."""

    verdict: Verdict
    metrics: Metrics
    probes: list[str] | None


def assess(
    collection: Collection,
    comparison: Comparison,
    *,
    parent: str | None,
    model: str = "",
    limits: Mapping[str, float] | None = None,
    checks: tuple[Check, ...] = (),
) -> Assessment:
    """Measure an aligned candidate against a version, and judge it.

    Args:
        collection: collection whose published refreshes say what is usual.
        comparison: the candidate, that version, and the collection's probes that can read both.
        parent: version that is served; None: the candidate is the first one of its generation.
        model: model family of the refreshes that say what is usual.
        limits: limits of a job for single metrics, which come first.
        checks: checks that were made before; they come first in the verdict.
    """
    metrics = measure(comparison)
    usual = {} if comparison.previous is None else usual_metrics(collection, parent, model)
    own = {} if comparison.previous is None else dict(limits or {})
    return Assessment(
        Verdict((*checks, *decide(metrics, Limits(own, usual)).checks)), metrics, sorted(comparison.probes)
    )
