"""Settings of publishing a job's vectors, and of keeping refreshed vectors near the served vectors. Torch-free.

A part of trainer.spec.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from embeddings.rff.registry import FEATURE_MAPS
from trainer.spec.base import May, Name, Positive, Removed, Spec, later

_REMOVED_BUCKETS = re.compile(r"cosine_(mean|p5|low)\[\d+(-\d+|\+)\]")
"""Pattern of removed metrics by number of training rows, such as ``cosine_mean[10-99]``."""


class MovingAverage(Spec):
    """Moving average of served vectors: z = unit((1 - w) z + w unit(h R)), with w ``new_weight``.

    z is an item's served vector, h its newly trained vector, and R the alignment of new vectors to served vectors. An
    item for which the cosine of z and h R is below ``reset_below_cosine`` is served as unit(h R).
    """

    new_weight: float = Field(default=0.3, gt=0.0, le=1.0)
    reset_below_cosine: float = Field(default=0.65, ge=-1.0, le=1.0)


class Gate(Spec):
    """Settings of the publication gate: its mode for versions that fail its checks, and limits of single metrics.

    ``enforce`` holds such a version, ``report`` publishes it with the verdict. ``limits``: limits by metric, in place
    of those from the collection's usual refreshes; a first version has no limits. ``max_held``: number of refreshes
    held in a row after which an operator is alerted (by a webhook or an alert). If nothing is wrong with these runs,
    their rows and their models, ``when_stuck: new_generation`` then publishes the newest of them as the first version
    of a new anchor generation; ``hold`` publishes none.
    """

    removed: ClassVar[dict[str, Removed]] = dict.fromkeys(
        ("calibrate", "calibrate_seconds"),
        Removed(
            "no job trains to set limits", "leave it out: limits come from the collection's own published refreshes"
        ),
    ) | {
        "promote": Removed(
            "no rule is needed to end a row of held refreshes", "leave it out: publish.gate.when_stuck has replaced it"
        )
    }

    mode: Literal["enforce", "report", "off"] = "enforce"
    limits: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = later({})
    max_held: int = later(3, ge=1, le=1000)
    when_stuck: Literal["new_generation", "hold"] = later("new_generation")

    @field_validator("mode", mode="before")
    @classmethod
    def _as_text(cls, mode: object) -> object:
        # YAML reads an unquoted off as false.
        return "off" if mode is False else mode

    @field_validator("limits")
    @classmethod
    def _of_metrics(cls, limits: dict[str, float]) -> dict[str, float]:
        if limits:
            from embeddings.refresh.gate_checks.base import base_of
            from embeddings.refresh.gate_checks.registry import LIMITS, REMOVED, limit_of, takes_group

            gone = [name for name in limits if base_of(name) in REMOVED or _REMOVED_BUCKETS.fullmatch(name)]
            for metric in gone:
                warnings.warn(f"the gate does not measure {metric}: its limit is ignored", FutureWarning, stacklevel=2)
            limits = {name: limit for name, limit in limits.items() if name not in gone}
            for metric in limits:
                if limit_of(metric) is None:
                    raise ValueError(f"'{metric}' is no metric of the gate: name some of {', '.join(LIMITS)}")
                base, bracket, _ = metric.partition("[")
                if bracket and not (metric.endswith("]") and takes_group(metric)):
                    raise ValueError(f"'{metric}' is no metric of the gate: write {base}")
        if limits.get("finite", 1.0) != 1.0:
            raise ValueError("finite: rows that are not finite are never served: leave it out")
        return limits


if TYPE_CHECKING:
    ViewKind = str
else:
    ViewKind = Literal[tuple(FEATURE_MAPS)]


class View(Spec):
    """A view of a collection: a form in which its vectors h, of size d, are served.

    ``rff`` serves random Fourier features phi(h) of even size ``dim`` (default 2d); ``identity`` serves h itself;
    ``exponential`` serves exp(<h, a>) for ``dim`` (default 256) items a, the anchors, which no rotation changes.
    """

    name: Name
    kind: ViewKind = "rff"
    dim: int | None = Field(default=None, ge=2, le=65536, multiple_of=2)
    sigma: float = Field(default=0.4, ge=1e-6, le=1e6, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**32)
    frequencies: Literal["orthogonal", "gaussian", "structured"] = "orthogonal"
    materialized: bool = False


class Expire(Spec):
    """Expiry of items that are no longer in the data, whose vectors are carried over from earlier versions.

    A carried item becomes missing after more publications than ``after_publications``, or once its own vector is older
    than ``after_days`` days; null means no such limit.
    """

    after_publications: int | None = Field(default=None, ge=1)
    after_days: int | None = Field(default=90, ge=1)


class Anchor(Spec):
    """L2 anchor to the version that was current when the job started.

    For each looked-up row e of an item that the version has, ``strength`` |e - n p|^2 is added to the sample's loss. n
    p is the item's row as it was trained: its served unit vector p times the norm n, rotated into the basis of the
    job's rows (trainer.publishing.anchor). New items, and rows looked up in pooled lists, have no anchor. With a
    stronger anchor, vectors change less, and more slowly follow items that have changed (docs/adr/0039).
    """

    strength: Positive = 0.01


class FrozenContext(Spec):
    """Frozen context: items are trained against the unchanged context of the parent, which ``init_from`` names.

    The context is users' rows, output vectors, or the other tower. Within the context, only ids that the parent did not
    have are trained (trainer.publishing.frozen_context; Di Carlo, Bianchi and Palmonari, Training temporal word
    embeddings with a compass, AAAI 2019). ``items``: rows of the items themselves begin at initial values (``fresh``)
    or at the parent's (``warm``).
    """

    items: Literal["fresh", "warm"] = "fresh"


class Evidence(Spec):
    """Treatment of items with few training rows.

    ``min_count``: fewest training rows, in this version and the version before, for an item to count in the gate's
    metrics of shared items (0: all count). ``mark_uncertain``: items with fewer than ``min_count`` rows are served as
    ``uncertain``, unless the version before served them without this mark.
    """

    removed: ClassVar[dict[str, Removed]] = {
        "align_half_count": Removed("it changed mean cosines by .01 at most", "leave it out")
    }

    min_count: int = Field(default=5, ge=0, le=1_000_000)
    mark_uncertain: bool = False


class Users(Spec):
    """Publication of users with the items of a version, so that the version recommends items to them.

    ``feature``: the feature with the users' ids. A user is published with the vector that scores items, and with the
    items of its training rows, which recommendations can leave out.
    """

    feature: str = "user"


class Publish(Spec):
    """Publication of a feature's vectors to a collection.

    ``users``: settings of the users that are published with the items; null publishes only items. ``every_seconds``,
    ``every_rows``: seconds, or rows, between versions that a one-pass job publishes while it trains, from its newest
    checkpoint (trainer.publishing.repeated). ``keep_generations``: number of earlier anchor generations whose consumers
    are still served, by views ``VIEW@gN``, when this job opens a new generation. ``sinks``: names of the operator's
    databases that get each version that the collection serves from now on, and no others; null changes nothing
    (embeddings.sinks). ``sink_wait_seconds``: seconds after which the job fails if a sink lacks its version; null does
    not wait for sinks.
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
    users: Users | None = later(None)
    keep_generations: int = later(2, ge=0, le=100)
    sinks: tuple[Name, ...] | None = later(None, max_length=16)
    sink_wait_seconds: float | None = later(None, gt=0.0, allow_inf_nan=False)

    @property
    def is_repeated(self) -> bool:
        """True if the job publishes while it trains."""
        return self.every_seconds is not None or self.every_rows is not None
