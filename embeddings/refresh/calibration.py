"""Limits of the gate from null refreshes: refreshes of the very model that differ by chance alone (docs/adr/0014)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from embeddings.refresh.gate import AT_MOST, LOWEST_RANK, Metrics, Thresholds, base_of
from embeddings.store.views import utc_now

if TYPE_CHECKING:
    from embeddings.store import Collection

MIN_NULLS = 3
SETTINGS = "calibration"


class Rule(NamedTuple):
    """How far from the worst null a limit lies: ``factor * worst``, then ``margin`` further out.

    ``bucket`` takes the place of ``margin`` for the metric in a bucket of counts, which has fewer items.
    """

    factor: float
    margin: float
    bucket: float = 0.0


# A factor alone would leave nothing where the nulls are near zero, so it has a margin too.
RULES: dict[str, Rule] = {
    "coverage": Rule(1.0, 0.02),
    "newly_carried": Rule(1.0, 0.05),
    "newly_carried_traffic": Rule(1.0, 0.05),
    "effective_rank": Rule(0.8, 0.0),
    "cosine_mean": Rule(1.0, 0.02, 0.05),
    "cosine_mean_traffic": Rule(1.0, 0.02),
    "cosine_p5": Rule(1.0, 0.05, 0.10),
    "cosine_p5_traffic": Rule(1.0, 0.05),
    "cosine_low": Rule(1.0, 0.005, 0.03),
    "cosine_low_traffic": Rule(1.0, 0.005),
    "knn_overlap": Rule(0.9, 0.0),
    "kernel_rms": Rule(1.2, 0.01),
    "norm_shift": Rule(1.2, 0.0),
    "norm_moved": Rule(1.0, 0.005),
    "norm_outside": Rule(1.5, 0.02),
    "canary_drop": Rule(1.0, 0.02),
    "canary_churn": Rule(1.3, 0.01),
}
_STANDARD_ERRORS = 2.0
"""A canary's figures are shares of its items: a margin is at least so many standard errors of such a share, or a task
of 150 items would hold every refresh that flips one more of them than the nulls did."""
# No null makes these looser than the starting values, and the effective rank by a quarter at most: a model that moves
# more than this by chance is not stable enough to be published without a warm start.
_FLOORED = {"cosine_mean", "cosine_p5", "cosine_low", "cosine_mean_traffic", "cosine_p5_traffic", "cosine_low_traffic"}


@dataclass(frozen=True)
class Calibration:
    """Limits of one model family in one collection.

    Attributes:
        limits: by metric.
        nulls: {mean, spread, worst} by metric, spread being the standard deviation.
        unstable: metrics whose nulls do not reach the starting values themselves.
        source: versions that were measured, as COLLECTION/VERSION.
    """

    model: str
    dim: int
    num_nulls: int
    limits: dict[str, float]
    nulls: dict[str, dict[str, float]]
    unstable: list[str]
    source: list[str]
    created_at: str

    def thresholds(self, start: Thresholds | None = None) -> Thresholds:
        """Return the starting values with these limits in their place."""
        return (start or Thresholds()).with_own(self.limits)

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def calibrated(
    nulls: Sequence[Metrics],
    *,
    model: str = "",
    start: Thresholds | None = None,
    overrides: Mapping[str, float] | None = None,
    source: Sequence[str] = (),
) -> Calibration:
    """Return the limits that ``nulls`` call for.

    The limit of a metric is that of its worst null, less the margin of :data:`RULES`; cosines over all items never
    below the starting values. A metric that a null lacks, or that is NaN there, keeps its starting value.

    Args:
        nulls: metrics of ``compare`` of at least 3 refreshes that differ by chance alone.
        model: the model family that the limits are for.
        start: starting values of the limits.
        overrides: limits by metric that are put in place of what was found.
        source: versions that were measured, as COLLECTION/VERSION.

    Raises:
        ValueError: fewer nulls, nulls of different dims, or an override of what is not measured.
    """
    if len(nulls) < MIN_NULLS:
        raise ValueError(f"{len(nulls)} null refreshes: at least {MIN_NULLS} are needed to calibrate a gate")
    dims = {int(metrics["dim"]) for metrics in nulls}
    if len(dims) > 1:
        raise ValueError(f"null refreshes of dims {sorted(dims)}: calibrate with refreshes of one model")
    start, dim = start or Thresholds(), dims.pop()
    limits: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {}
    unstable = []
    for name in nulls[0]:
        values = np.array([metrics.get(name, np.nan) for metrics in nulls], dtype=np.float64)
        rule = RULES.get(base_of(name))
        if rule is None or not np.isfinite(values).all():
            continue
        at_most = base_of(name) in AT_MOST
        worst = float(values.max() if at_most else values.min())
        found[name] = {"mean": float(values.mean()), "spread": float(values.std(ddof=1)), "worst": worst}
        if base_of(name) == "canary_drop":
            # Nulls that go on learning make a canary better; a refresh that does not is no fault.
            worst = max(worst, 0.0)
        margin = rule.bucket if "[" in name and name.startswith("cosine") else rule.margin
        if base_of(name).startswith("canary"):
            margin = max(margin, _STANDARD_ERRORS * _standard_error(name, nulls))
        limit = rule.factor * worst + (margin if at_most else -margin)
        floor = start.limit(name, dim) if name in _FLOORED else None
        if floor is not None:
            if (worst > floor) if at_most else (worst < floor):
                unstable.append(name)
            limit = min(limit, floor) if at_most else max(limit, floor)
        if name == "effective_rank":
            lowest = LOWEST_RANK * (start.limit(name, dim) or 0.0)
            if worst < lowest:
                unstable.append(name)
            limit = max(limit, lowest)
        limits[name] = limit
    unknown = sorted(set(overrides or ()) - set(nulls[0]))
    if unknown:
        raise ValueError(f"limits of {', '.join(unknown)}: no such metric; there are {', '.join(sorted(nulls[0]))}")
    limits |= {name: float(limit) for name, limit in (overrides or {}).items()}
    return Calibration(model, dim, len(nulls), limits, found, unstable, list(source), utc_now())


def _standard_error(name: str, nulls: Sequence[Metrics]) -> float:
    """Return sqrt(p (1 - p) / n) of ``canary_drop[NAME]`` or ``canary_churn[NAME]``.

    p is the worst churn of the nulls, which bounds how much a drop can be, and n the fewest items that it was a share
    of; the result is 0 where nulls do not say how many.
    """
    task = name[name.index("[") :]
    size = "canary_items" if name.startswith("canary_churn") else "canary_judged"
    fewest = min(metrics.get(size + task, 0.0) for metrics in nulls)
    share = max(metrics.get("canary_churn" + task, 0.0) for metrics in nulls)
    return math.sqrt(share * (1.0 - share) / fewest) if fewest > 0 and 0.0 <= share <= 1.0 else 0.0


def settings_name(model: str) -> str:
    """Return the name that a calibration of a model family is kept under."""
    return model or "default"


def calibrate(
    collection: Collection,
    nulls: Collection,
    versions: Sequence[str],
    *,
    overrides: Mapping[str, float] | None = None,
    only_nulls: bool = False,
) -> Calibration:
    """Calibrate ``collection`` by null refreshes, and keep the limits in the collection's settings.

    Args:
        collection: the collection that is served from.
        nulls: the scratch collection of the null refreshes.
        versions: versions of ``nulls``, each a null refresh that was measured against the one before it.
        overrides: limits by metric that are put in place of what was found.
        only_nulls: refuse a collection that holds more than these and the version before them, as one does that is
            served from.

    Raises:
        ValueError: a collection that ``only_nulls`` refuses, fewer than 3 versions, a version that was not measured
            against another, or of another model or dim than what the collection serves.
        UnknownVersion: there is no such version.
        UnknownCollection: there is no such collection.
    """
    served = collection.manifest()
    measured = []
    for version in versions:
        manifest = nulls.manifest(version)
        where = f"version {version} of '{nulls.name}'"
        if "cosine_mean" not in manifest.get("metrics", {}):
            raise ValueError(f"{where} was not measured against one before it: leave out the first, and gate mode off")
        if (manifest.get("model"), manifest["dim"]) != (served.get("model"), served["dim"]):
            raise ValueError(
                f"{where} is of model '{manifest.get('model')}' with dim {manifest['dim']}; '{collection.name}' serves "
                f"'{served.get('model')}' with dim {served['dim']}: calibrate with refreshes of the served model"
            )
        measured.append(manifest["metrics"])
    found = calibrated(
        measured,
        model=served.get("model") or "",
        overrides=overrides,
        source=[f"{nulls.name}/{version}" for version in versions],
    )
    if only_nulls:
        _refuse_served(nulls, versions)
    collection.save_settings(SETTINGS, settings_name(found.model), found.as_document())
    return found


def _refuse_served(nulls: Collection, versions: Sequence[str]) -> None:
    """Raise ValueError unless a scratch collection holds the nulls and, before them, the version measured against.

    A collection that is served from would lose the versions that it can be rolled back to.
    """
    others = [
        manifest["version"]
        for manifest in nulls.versions()
        if manifest["state"] != "expired" and manifest["version"] not in versions
    ]
    later = [other for other in others if int(other[1:]) > min(int(version[1:]) for version in versions)]
    if len(others) > 1 or later or nulls.settings(SETTINGS):
        raise ValueError(
            f"'{nulls.name}' is no scratch collection of these nulls: it has a calibration of its own, or versions "
            f"besides them and the one before ({', '.join(others[:5])}): publish the nulls to a collection of their own"
        )


def calibration_of(collection: Collection, model: str, dim: int) -> Calibration | None:
    """Return the collection's calibration of a model family; None without one, and for one of another dim."""
    document = collection.settings(SETTINGS).get(settings_name(model))
    if document is None or document["dim"] != dim:
        return None
    return Calibration(**document)
