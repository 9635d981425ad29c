"""Settings of a refresh: the shape of a JobSpec's ``publish`` part, and that shape without a JobSpec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from embeddings.refresh.merge import Expiry, ExpirySettings
from embeddings.rff import DEFAULT_SIGMA

__all__ = [
    "AverageSettings", "Expiry", "ExpirySettings", "Gate", "GateSettings", "MovingAverage", "PublishSettings",
    "Settings", "View", "ViewSettings",
]  # fmt: skip


class AverageSettings(Protocol):
    @property
    def new_weight(self) -> float: ...
    @property
    def reset_below_cosine(self) -> float: ...


class GateSettings(Protocol):
    @property
    def mode(self) -> str: ...


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


@dataclass(frozen=True)
class MovingAverage:
    """z = unit((1 - new_weight) z + new_weight h R); below the cosine an item takes its new vector whole."""

    new_weight: float = 0.3
    reset_below_cosine: float = 0.65


@dataclass(frozen=True)
class Gate:
    """What the gate does with a candidate.

    ``enforce``: a candidate that fails is held. ``report``: it is published with the verdict. ``off``: not measured.
    """

    mode: Literal["enforce", "report", "off"] = "enforce"


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
