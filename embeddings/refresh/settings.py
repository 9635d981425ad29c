"""Settings of a refresh: those in the ``publish`` part of a JobSpec that it needs, with the same names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from embeddings.refresh.merge import Expiry
from embeddings.rff import DEFAULT_SIGMA

__all__ = ["MAX_HELD", "Evidence", "Expiry", "Gate", "MovingAverage", "Settings", "View"]
MAX_HELD = 3
"""Number of refreshes held in a row that raises an alert."""
KEEP_GENERATIONS = 2
"""Most earlier generations that a new generation has maps to."""


@dataclass(frozen=True)
class MovingAverage:
    """z = unit((1 - new_weight) z + new_weight h R); an item below the cosine takes its new vector unaveraged."""

    new_weight: float = 0.3
    reset_below_cosine: float = 0.65


@dataclass(frozen=True)
class Gate:
    """Settings of the publication gate.

    ``mode``: ``enforce`` holds a candidate that fails, ``report`` publishes it with the verdict, ``off`` measures
    nothing. ``limits``: limits of single metrics, which replace the gate's own. ``max_held``: number of versions held
    in a row that raises an alert. From then on, if none of them has a fault of run, rows or model, ``when_stuck:
    new_generation`` publishes the newest as the first version of a new anchor generation; ``hold`` continues holding.
    """

    mode: Literal["enforce", "report", "off"] = "enforce"
    limits: Mapping[str, float] = field(default_factory=dict)
    max_held: int = MAX_HELD
    when_stuck: Literal["new_generation", "hold"] = "new_generation"


@dataclass(frozen=True)
class Evidence:
    """Thresholds on the number of an item's training rows.

    ``min_count``: items of fewer rows, in this version or the version before, are excluded from the gate's metrics of
    shared items; 0: no item is. ``mark_uncertain``: True if items of fewer than ``min_count`` rows are served as
    ``uncertain``, unless an earlier version had them as found or carried.
    """

    min_count: int = 5
    mark_uncertain: bool = False


@dataclass(frozen=True)
class View:
    """A feature view, as in a JobSpec."""

    name: str
    kind: str = "rff"
    dim: int | None = None
    sigma: float = DEFAULT_SIGMA
    seed: int = 0
    frequencies: str = "orthogonal"
    materialized: bool = False


@dataclass(frozen=True)
class Settings:
    """Publishing settings."""

    align: bool = True
    ema: MovingAverage | None = field(default_factory=MovingAverage)
    gate: Gate = field(default_factory=Gate)
    views: tuple[View, ...] = ()
    expire: Expiry | None = field(default_factory=Expiry)
    evidence: Evidence = field(default_factory=Evidence)
    keep_generations: int = KEEP_GENERATIONS
