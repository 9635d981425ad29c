"""The checks of the gate: to add a check, write its class and enter it at the end."""

from __future__ import annotations

from embeddings.refresh.gate_checks.absent_items import Carried, Missing
from embeddings.refresh.gate_checks.anchor_drift import AnchorDrift
from embeddings.refresh.gate_checks.base import GateCheck, Limit, Subject, base_of
from embeddings.refresh.gate_checks.cosines import Cosines
from embeddings.refresh.gate_checks.effective_rank import EffectiveRank
from embeddings.refresh.gate_checks.frozen_probes import FrozenProbes
from embeddings.refresh.gate_checks.model_quality import ModelQuality
from embeddings.refresh.gate_checks.neighbours import Neighbours
from embeddings.refresh.gate_checks.norms import Norms
from embeddings.refresh.gate_checks.row_figures import RowFigures
from embeddings.refresh.gate_checks.rows import Rows
from embeddings.refresh.model_comparison import NEWEST_ROWS

# Manifests list metrics, and checks that sample draw random numbers, in this order.
CHECKS: tuple[type[GateCheck], ...] = (
    Rows, EffectiveRank, Missing, Carried, Cosines, Neighbours, Norms, FrozenProbes, AnchorDrift,
    RowFigures, ModelQuality,
)  # fmt: skip

LIMITS: dict[str, Limit] = {limit.metric: limit for check in CHECKS for limit in check.limits}
REMOVED = frozenset(
    {"kernel_rms", "turn_p999", "norm_moved", "norm_outside", "cosine_p5_traffic", "cosine_low_traffic"}
)
"""Metrics that the gate does not measure; limits of them in stored jobs are ignored with a warning."""


def limit_of(metric: str) -> Limit | None:
    """Return the limit of ``metric`` or ``metric[GROUP]``, None if it has none."""
    return LIMITS.get(base_of(metric))


def takes_group(metric: str) -> bool:
    """Return True if ``metric[GROUP]`` is measured, with a probe or a slice of the rows as GROUP."""
    base, _, group = metric.rstrip("]").partition("[")
    if base == "model_metric":
        return group == NEWEST_ROWS
    return base.startswith("canary_") or base in ("model_gain", "model_metric_before")


_SUBJECTS: dict[str, Subject] = {limit.metric: limit.about or check.about for check in CHECKS for limit in check.limits}


def subject_of(metric: str) -> Subject:
    """Return the subject of a failure of ``metric`` or ``metric[GROUP]``; ``run`` if no check measures it."""
    return _SUBJECTS.get(base_of(metric), "run")
