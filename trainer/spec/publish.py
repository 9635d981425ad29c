"""What a job publishes, and what keeps the vectors of its refreshes near those that are served. Torch-free.

A part of trainer.spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from embeddings.rff.registry import FEATURE_MAPS
from trainer.spec.base import May, Name, Positive, Spec, later


class MovingAverage(Spec):
    """z = unit((1 - w) z + w h R); an item whose aligned cosine falls below the limit takes its new vector whole."""

    new_weight: float = Field(default=0.3, gt=0.0, le=1.0)
    reset_below_cosine: float = Field(default=0.65, ge=-1.0, le=1.0)


class Promote(Spec):
    """Which held versions are published all the same, once ``max_held`` refreshes were held in a row.

    ``only``: metrics of the gate about items and vectors, with a bucket (``cosine_mean[10-99]``) or without, which
    means all of its buckets; what fails any other stays held. ``settled``: it must also pass every check against the
    version that was held before it (docs/adr/0063).
    """

    only: tuple[str, ...] = Field(min_length=1)
    settled: bool = True

    @field_validator("only")
    @classmethod
    def _of_moving_data(cls, only: tuple[str, ...]) -> tuple[str, ...]:
        # Here, as the gate brings numpy along, which nobody waits for who writes no rule.
        from embeddings.refresh.gate_checks.registry import MOVING, limit_of, subject_of

        for metric in only:
            if limit_of(metric) is None:
                raise ValueError(f"'{metric}' is no metric of the gate: name some of {', '.join(MOVING)}")
            if subject_of(metric) == "run":
                raise ValueError(
                    f"'{metric}' fails where a run is at fault, and such a version is never published by a rule: "
                    f"name some of {', '.join(MOVING)}"
                )
        return only


class Gate(Spec):
    """What the gate does with a version that fails, and where its limits come from.

    ``enforce`` holds such a version, ``report`` publishes it with the verdict. ``calibrate``: by ``auto`` the first
    publication of a collection trains on each half of its rows in turn and takes the gate's limits from what differs
    between them (trainer.launch.halves), where that takes at most ``calibrate_seconds``. ``limits``: of single metrics,
    with a bucket or without, in the place of calibrated and starting ones; not of a first version. ``max_held``: so
    many refreshes held in a row call somebody (a webhook, an alert); ``promote``: a rule that may then publish one.
    """

    mode: Literal["enforce", "report", "off"] = "enforce"
    calibrate: Literal["auto", "off"] = later("auto")
    calibrate_seconds: float = later(600.0, gt=0, allow_inf_nan=False)
    limits: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = later({})
    max_held: int = later(3, ge=1, le=1000)
    promote: Promote | None = later(None)

    @field_validator("mode", "calibrate", mode="before")
    @classmethod
    def _as_text(cls, mode: object) -> object:
        # YAML reads an unquoted off as false.
        return "off" if mode is False else mode

    @field_validator("limits")
    @classmethod
    def _of_metrics(cls, limits: dict[str, float]) -> dict[str, float]:
        if limits:
            from embeddings.refresh.gate_checks.registry import LIMITS, groups_of, limit_of

            for metric in limits:
                if limit_of(metric) is None:
                    raise ValueError(f"'{metric}' is no metric of the gate: name some of {', '.join(LIMITS)}")
                base, bracket, group = metric.partition("[")
                groups = groups_of(base)
                if bracket and (not group.endswith("]") or (groups is not None and group[:-1] not in groups)):
                    told = f"write {base}[{'], ['.join(groups)}]" if groups else f"write {base}"
                    raise ValueError(f"'{metric}' is no metric of the gate: {told}")
        if limits.get("finite", 1.0) != 1.0:
            raise ValueError("finite: rows that are not finite are never served: leave it out")
        return limits

    @model_validator(mode="after")
    def _enforced(self) -> Gate:
        if self.promote is not None and self.mode != "enforce":
            raise ValueError(
                f"promote is of held versions, and mode {self.mode} holds none: use enforce, or leave it out"
            )
        return self


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
    anchor, nor has what is looked up in pooled lists. A stronger anchor makes vectors change less, and follow an item
    that has moved more slowly (docs/adr/0039).
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


class Evidence(Spec):
    """What the number of an item's rows of training decides.

    ``min_count``: items of fewer rows, in this version or the one before, do not count in what the gate measures of the
    shared items (0: all do). ``align_half_count``: a pair of the rotation weighs n / (n + that), n the fewer of its two
    counts; null: all alike. ``mark_uncertain``: items of fewer than ``min_count`` rows that no version before knew
    better are served as ``uncertain``.
    """

    min_count: int = Field(default=5, ge=0, le=1_000_000)
    align_half_count: Positive | None = None
    mark_uncertain: bool = False


class Publish(Spec):
    """Which vectors are published, where and how.

    ``every_seconds``, ``every_rows``: of a job of one pass, also while it trains: a version from its newest checkpoint
    after so many seconds, or rows, since the last one (trainer.publishing.repeated).
    """

    old_names: ClassVar[dict[str, str]] = {"compass": "frozen_context"}

    collection: Name
    feature: str
    align: bool = True
    ema: MovingAverage | None = MovingAverage()
    gate: Gate = Gate()
    views: tuple[View, ...] = ()
    expire: Expire | None = Expire()
    anchor: Annotated[Anchor | None, May.CHANGE_TRAINING] = later(None)
    frozen_context: Annotated[FrozenContext | None, May.CHANGE_TRAINING] = later(None)
    every_seconds: float | None = later(None, gt=0.0, allow_inf_nan=False)
    every_rows: int | None = later(None, ge=1)
    evidence: Evidence = later(Evidence())

    @property
    def is_repeated(self) -> bool:
        """Whether the job publishes while it trains."""
        return self.every_seconds is not None or self.every_rows is not None
