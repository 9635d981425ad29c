"""Settings of a refresh: the shape of a JobSpec's ``publish`` part, and that shape without a JobSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from embeddings.refresh.merge import Expiry, ExpirySettings
from embeddings.rff import DEFAULT_SIGMA

__all__ = [
    "MAX_HELD", "AverageSettings", "Evidence", "EvidenceSettings", "Expiry", "ExpirySettings", "Gate", "GateSettings",
    "MovingAverage", "PublishSettings", "Settings", "View", "ViewSettings",
]  # fmt: skip
MAX_HELD = 3
"""Number of refreshes held in a row after which somebody is called."""


class AverageSettings(Protocol):
    @property
    def new_weight(self) -> float: ...
    @property
    def reset_below_cosine(self) -> float: ...


class GateSettings(Protocol):
    @property
    def mode(self) -> str: ...
    @property
    def limits(self) -> Mapping[str, float]: ...
    @property
    def max_held(self) -> int: ...
    @property
    def when_stuck(self) -> str: ...


class EvidenceSettings(Protocol):
    @property
    def min_count(self) -> int: ...
    @property
    def mark_uncertain(self) -> bool: ...


class ViewSettings(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def dim(self) -> int | None: ...
    @property
    def sigma(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def frequencies(self) -> str: ...
    @property
    def materialized(self) -> bool: ...


class PublishSettings(Protocol):
    """The ``publish`` part of a JobSpec, which has this shape; :class:`Settings` is it without a JobSpec."""

    @property
    def align(self) -> bool: ...
    @property
    def ema(self) -> AverageSettings | None: ...
    @property
    def gate(self) -> GateSettings: ...
    @property
    def views(self) -> Sequence[ViewSettings]: ...
    @property
    def expire(self) -> ExpirySettings | None: ...
    @property
    def evidence(self) -> EvidenceSettings: ...


@dataclass(frozen=True)
class MovingAverage:
    """z = unit((1 - new_weight) z + new_weight h R); below the cosine an item takes its new vector whole."""

    new_weight: float = 0.3
    reset_below_cosine: float = 0.65


@dataclass(frozen=True)
class Gate:
    """What the gate does with a candidate.

    ``enforce``: a candidate that fails is held. ``report``: it is published with the verdict. ``off``: not measured.
    ``limits``: limits of single metrics, which come first. ``max_held``: number of versions held in a row after which
    somebody is called, and after which, if all of them look honest, ``when_stuck: new_generation`` publishes the newest
    as the first version of a new anchor generation; ``hold`` goes on holding.
    """

    mode: Literal["enforce", "report", "off"] = "enforce"
    limits: Mapping[str, float] = field(default_factory=dict)
    max_held: int = MAX_HELD
    when_stuck: Literal["new_generation", "hold"] = "new_generation"


@dataclass(frozen=True)
class Evidence:
    """What the number of an item's rows of training decides.

    ``min_count``: items of fewer rows, in this version or the one before, do not count in what the gate measures of the
    shared items; 0: all do. ``mark_uncertain``: items of fewer than ``min_count`` rows that no version before knew
    better are served as ``uncertain``.
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
    """Publishing settings outside a JobSpec; the defaults are the JobSpec's."""

    align: bool = True
    ema: MovingAverage | None = field(default_factory=MovingAverage)
    gate: Gate = field(default_factory=Gate)
    views: tuple[View, ...] = ()
    expire: Expiry | None = field(default_factory=Expiry)
    evidence: Evidence = field(default_factory=Evidence)
