"""Settings of a refresh: the shape of a JobSpec's ``publish`` part, and that shape without a JobSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from embeddings.refresh.merge import Expiry, ExpirySettings
from embeddings.rff import DEFAULT_SIGMA

__all__ = [
    "MAX_HELD", "AverageSettings", "Evidence", "EvidenceSettings", "Expiry", "ExpirySettings", "Gate", "GateSettings",
    "MovingAverage", "Promote", "PromoteSettings", "PublishSettings", "Settings", "View", "ViewSettings",
]  # fmt: skip
MAX_HELD = 3
"""Refreshes held in a row after which somebody is called."""


class AverageSettings(Protocol):
    @property
    def new_weight(self) -> float: ...
    @property
    def reset_below_cosine(self) -> float: ...


class PromoteSettings(Protocol):
    @property
    def only(self) -> Sequence[str]: ...
    @property
    def settled(self) -> bool: ...


class GateSettings(Protocol):
    @property
    def mode(self) -> str: ...
    @property
    def limits(self) -> Mapping[str, float]: ...
    @property
    def max_held(self) -> int: ...
    @property
    def promote(self) -> PromoteSettings | None: ...


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
class Promote:
    """Which held candidates are published all the same, once ``max_held`` were held in a row.

    ``only``: metrics, with or without a bucket; a candidate that fails others stays held. ``settled``: it must pass
    every check against the one that was held before it.
    """

    only: tuple[str, ...]
    settled: bool = True


@dataclass(frozen=True)
class Gate:
    """What the gate does with a candidate.

    ``enforce``: a candidate that fails is held. ``report``: it is published with the verdict. ``off``: not measured.
    ``limits``: of single metrics, in the place of calibrated and starting ones. ``max_held``: so many held in a row
    call somebody; then ``promote``, if given, may let one through.
    """

    mode: Literal["enforce", "report", "off"] = "enforce"
    limits: Mapping[str, float] = field(default_factory=dict)
    max_held: int = MAX_HELD
    promote: Promote | None = None


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
