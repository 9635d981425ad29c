"""The gate of one collection: what is measured of a candidate, by which limits it is judged, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embeddings.refresh import probe
from embeddings.refresh.calibration import calibration_of
from embeddings.refresh.gate import Check, Metrics, Thresholds, Verdict, decide
from embeddings.refresh.gate_metrics import compare
from embeddings.vectors.item_vectors import Array, ItemVectors

if TYPE_CHECKING:
    from embeddings.store import Collection


@dataclass(frozen=True)
class Assessment:
    """A verdict on metrics.

    ``record`` is for the manifest: which calibration and probes took part.
    """

    verdict: Verdict
    metrics: Metrics
    record: dict[str, Any]


def assess(
    collection: Collection,
    previous: ItemVectors | None,
    candidate: ItemVectors,
    *,
    anchor_generation: int,
    model: str = "",
    live: Array | None = None,
    thresholds: Thresholds | None = None,
    checks: tuple[Check, ...] = (),
    seed: int = 0,
) -> Assessment:
    """Measure the aligned ``candidate`` against the ``previous`` version (see ``compare``), and judge it.

    The collection's probes of ``anchor_generation`` read both. The limits are ``thresholds``; where they are left out,
    the collection's calibration for ``model``, else the starting values. ``checks`` come first in the verdict.
    """
    metrics: dict[str, float] = compare(previous, candidate, live=live, seed=seed)
    canaries = probe.canaries_of(collection, anchor_generation) if previous is not None else {}
    if previous is not None:
        metrics.update(probe.measure(canaries, previous, candidate))
    calibration = calibration_of(collection, model, candidate.dim)
    if thresholds is None:
        thresholds = Thresholds().with_own(probe.starting_limits(canaries))
        # Limits of distances between versions mean nothing to a version that has none before it.
        if calibration is not None and previous is not None:
            thresholds = calibration.thresholds(thresholds)
    record: dict[str, Any] = {"canaries": sorted(canaries), "calibration": None}
    if calibration is not None:
        record["calibration"] = {
            name: getattr(calibration, name) for name in ("model", "num_nulls", "nulls", "limits", "created_at")
        }
    return Assessment(Verdict((*checks, *decide(metrics, thresholds).checks)), metrics, record)
