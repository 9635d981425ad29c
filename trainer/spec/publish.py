"""What a job publishes, and what keeps the vectors of its refreshes near those that are served. Torch-free.

A part of trainer.spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from embeddings.rff.registry import FEATURE_MAPS
from trainer.spec.base import May, Name, Positive, Spec, later


class MovingAverage(Spec):
    """z = unit((1 - w) z + w h R); an item whose aligned cosine falls below the limit takes its new vector whole."""

    new_weight: float = Field(default=0.3, gt=0.0, le=1.0)
    reset_below_cosine: float = Field(default=0.65, ge=-1.0, le=1.0)


class Gate(Spec):
    mode: Literal["enforce", "report", "off"] = "enforce"

    @field_validator("mode", mode="before")
    @classmethod
    def _as_text(cls, mode: object) -> object:
        # YAML reads an unquoted off as false.
        return "off" if mode is False else mode


if TYPE_CHECKING:
    ViewKind = str
else:
    ViewKind = Literal[tuple(FEATURE_MAPS)]


class View(Spec):
    """A view of a collection: ``rff`` maps h to phi of even size ``dim`` (default 2d); ``identity`` serves h."""

    name: Name
    kind: ViewKind = "rff"
    dim: int | None = Field(default=None, ge=2, le=65536, multiple_of=2)
    sigma: float = Field(default=0.4, ge=1e-6, le=1e6, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**32)
    frequencies: Literal["orthogonal", "gaussian", "structured"] = "orthogonal"
    materialized: bool = False


class Expire(Spec):
    """When an item that is carried over, because runs no longer find it, becomes missing.

    It does after more publications than ``after_publications``, or once its own vector is older than ``after_days``
    days; null means no such limit.
    """

    after_publications: int | None = Field(default=None, ge=1)
    after_days: int | None = Field(default=90, ge=1)


class Anchor(Spec):
    """L2 anchor to the version that was current when the job started.

    ``strength`` |e - n p|^2 is added to a sample's loss for each row e that it looks up of an item that the version
    has, p being the served vector and n its norm, in the job's own basis (trainer.publishing.anchor). New items have no
    anchor. A stronger anchor makes vectors change less, and follow an item that has moved more slowly (docs/adr/0039).
    """

    strength: Positive = 0.01


class FrozenContext(Spec):
    """Frozen context: what items are trained against is the parent's, named by ``init_from``, and does not change.

    The context is users' rows, output vectors, or the other tower; only ids that the parent did not have are trained
    (trainer.publishing.frozen_context; Di Carlo, Bianchi and Palmonari, Training temporal word embeddings with a
    compass, AAAI 2019). ``items``: rows of the items themselves begin ``fresh``, at initial values, or ``warm``, where
    the parent left them.
    """

    items: Literal["fresh", "warm"] = "fresh"


class Publish(Spec):
    renamed: ClassVar[dict[str, str]] = {"compass": "frozen_context"}

    collection: Name
    feature: str
    align: bool = True
    ema: MovingAverage | None = MovingAverage()
    gate: Gate = Gate()
    views: tuple[View, ...] = ()
    expire: Expire | None = Expire()
    anchor: Annotated[Anchor | None, May.CHANGE_TRAINING] = later(None)
    frozen_context: Annotated[FrozenContext | None, May.CHANGE_TRAINING] = later(None)
