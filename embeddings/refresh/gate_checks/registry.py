"""The checks of the gate: to add one, write its class and enter it at the end."""

from __future__ import annotations

from embeddings.refresh.gate_checks.absent_items import Carried, Missing
from embeddings.refresh.gate_checks.anchor_drift import AnchorDrift
from embeddings.refresh.gate_checks.base import GateCheck, Limit, Subject, base_of
from embeddings.refresh.gate_checks.cosines import Cosines, count_buckets
from embeddings.refresh.gate_checks.effective_rank import EffectiveRank
from embeddings.refresh.gate_checks.frozen_probes import FrozenProbes
from embeddings.refresh.gate_checks.kernel import KernelChange
from embeddings.refresh.gate_checks.neighbours import Neighbours
from embeddings.refresh.gate_checks.norms import Norms
from embeddings.refresh.gate_checks.rows import Rows
from embeddings.refresh.gate_checks.turns import Turns

# In the order in which manifests list their metrics and those that sample draw.
CHECKS: tuple[type[GateCheck], ...] = (
    Rows, EffectiveRank, Missing, Carried, Cosines, Neighbours, KernelChange, Norms, FrozenProbes, AnchorDrift,
    Turns,
)  # fmt: skip

LIMITS: dict[str, Limit] = {limit.metric: limit for check in CHECKS for limit in check.limits}


def limit_of(metric: str) -> Limit | None:
    """Return what limits ``metric`` or ``metric[GROUP]``, None for one that is not judged."""
    return LIMITS.get(base_of(metric))


def groups_of(base: str) -> list[str] | None:
    """Return the names in ``base[NAME]`` of a metric that is judged: decades of counts; None where they are probes'."""
    limit = LIMITS[base]
    if limit.starting_in_group is None:
        return []
    return None if limit.starting is None else [name for name, _, _ in count_buckets()]


_SUBJECTS: dict[str, Subject] = {limit.metric: check.about for check in CHECKS for limit in check.limits}
MOVING = tuple(metric for metric, about in _SUBJECTS.items() if about != "run")
"""Metrics that fail where the data moved, which a user's rule may let through (embeddings.refresh.holding)."""


def subject_of(metric: str) -> Subject:
    """Return what a failure of ``metric`` or ``metric[GROUP]`` is of; ``run`` for what no check measures."""
    return _SUBJECTS.get(base_of(metric), "run")
