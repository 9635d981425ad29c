"""Limits of the gate from null refreshes: refreshes of the very model that differ by chance alone (docs/adr/0014)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from embeddings.refresh.gate import Thresholds
from embeddings.refresh.gate_checks.base import Metrics
from embeddings.refresh.gate_checks.registry import limit_of
from embeddings.store.collection.directory import VERSION_PATTERN
from embeddings.store.views import utc_now

if TYPE_CHECKING:
    from embeddings.store import Collection

MIN_NULLS, MIN_HALVES = 3, 2
SETTINGS = "calibration"


@dataclass(frozen=True)
class Calibration:
    """Limits of one model family in one collection.

    Attributes:
        limits: by metric.
        nulls: {mean, spread, worst} by metric, spread being the standard deviation.
        unstable: metrics whose nulls do not reach the starting values themselves.
        source: versions that were measured, as COLLECTION/VERSION.
        kind: what the nulls were: ``refreshes`` on the same rows, or ``halves`` of them.
    """

    model: str
    dim: int
    num_nulls: int
    limits: dict[str, float]
    nulls: dict[str, dict[str, float]]
    unstable: list[str]
    source: list[str]
    created_at: str
    kind: str = "refreshes"

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

    The limit of a metric is that of its worst null, less the margin of its check (``Calibrated``); cosines over all
    items are never judged more loosely than by the starting values. A metric that a null lacks, or that is NaN there,
    keeps its starting value.

    Args:
        nulls: metrics of ``compare`` of at least 3 refreshes that differ by chance alone.
        model: the model family that the limits are for.
        start: starting values of the limits.
        overrides: limits by metric that are put in place of what was found.
        source: versions that were measured, as COLLECTION/VERSION.

    Raises:
        ValueError: fewer nulls, nulls of different dims, or an override of what is not measured, or not judged.
    """
    if len(nulls) < MIN_NULLS:
        raise ValueError(f"{len(nulls)} null refreshes: at least {MIN_NULLS} are needed to calibrate a gate")
    dims = {int(metrics["dim"]) for metrics in nulls}
    if len(dims) > 1:
        raise ValueError(f"null refreshes of dims {sorted(dims)}: calibrate with refreshes of one model")
    start, dim = start or Thresholds(), dims.pop()
    limits: dict[str, float] = {}
    spreads: dict[str, dict[str, float]] = {}
    unstable = []
    for name in nulls[0]:
        values = np.array([metrics.get(name, np.nan) for metrics in nulls], dtype=np.float64)
        limit = limit_of(name)
        if limit is None or limit.calibrated is None or not np.isfinite(values).all():
            continue
        worst = float(values.max() if limit.at_most else values.min())
        spreads[name] = {"mean": float(values.mean()), "spread": float(values.std(ddof=1)), "worst": worst}
        limits[name] = limit.from_nulls(name, worst, nulls)
        starting = start.limit(name, dim)
        if limit.calibrated.loosest is not None and starting is not None and "[" not in name:
            loosest, tighter = limit.calibrated.loosest * starting, min if limit.at_most else max
            if worst != tighter(worst, loosest):
                unstable.append(name)
            limits[name] = tighter(limits[name], loosest)
    judged = sorted(name for name in nulls[0] if limit_of(name) is not None)
    unknown = sorted(set(overrides or ()) - set(judged))
    if unknown:
        raise ValueError(f"limits of {', '.join(unknown)}: no such metric has one; there are {', '.join(judged)}")
    limits |= {name: float(limit) for name, limit in (overrides or {}).items()}
    return Calibration(model, dim, len(nulls), limits, spreads, unstable, list(source), utc_now())


def calibrated_by_halves(nulls: Sequence[Metrics], *, model: str = "", source: Sequence[str] = ()) -> Calibration:
    """Return the limits that nulls on other rows call for.

    Each null is trained on one half of the rows and measured against a version of the other half, which is what two
    days differ by where nothing has changed but who clicked. There are few of them and days change, so that the margin
    is the wider one of buckets, and a limit is only ever made looser: but for those whose starting values bind hardly,
    which are tightened as far as ``Calibrated.by_halves`` says. Cosines are judged no more loosely than those in a
    bucket are: nulls beyond that make a metric ``unstable``.

    Args:
        nulls: metrics of ``compare``, at least 2.
        model: the model family that the limits are for.
        source: what was measured.

    Raises:
        ValueError: fewer nulls.
    """
    if len(nulls) < MIN_HALVES:
        raise ValueError(f"{len(nulls)} nulls: at least {MIN_HALVES} are needed to calibrate a gate by halves")
    start, dim = Thresholds(), int(nulls[0]["dim"])
    limits: dict[str, float] = {}
    spreads: dict[str, dict[str, float]] = {}
    unstable = []
    for name in nulls[0]:
        values = np.array([metrics.get(name, np.nan) for metrics in nulls], dtype=np.float64)
        limit, starting = limit_of(name), start.limit(name, dim)
        if limit is None or limit.calibrated is None or starting is None or not np.isfinite(values).all():
            continue
        looser, worst = (max, float(values.max())) if limit.at_most else (min, float(values.min()))
        spreads[name] = {"mean": float(values.mean()), "spread": float(values.std(ddof=1)), "worst": worst}
        # As if it were of a bucket, whose margin is the wider one where there are two.
        margin = max(limit.calibrated.group_margin, limit.calibrated.margin)
        found = limit.calibrated.factor * worst + (margin if limit.at_most else -margin)
        loosest = limit_of(name.removesuffix("_traffic"))
        if limit.calibrated.loosest is not None and loosest is not None and loosest.starting_in_group is not None:
            if looser(worst, loosest.starting_in_group) != loosest.starting_in_group:
                unstable.append(name)
            found = (min if limit.at_most else max)(found, loosest.starting_in_group)
        if limit.calibrated.by_halves is not None:
            limits[name] = looser(found, limit.calibrated.by_halves)
        elif looser(found, starting) != starting:
            limits[name] = found
    return Calibration(model, dim, len(nulls), limits, spreads, unstable, list(source), utc_now(), "halves")


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
        ValueError: a collection that ``only_nulls`` refuses, fewer than 3 versions, one that is named twice or not by
            its own name, was not measured against another, or is of another model or dim than what the collection
            serves.
        UnknownVersion: there is no such version.
        UnknownCollection: there is no such collection.
    """
    served = collection.manifest()
    _refuse_names(versions)
    measured = []
    for version in versions:
        manifest = nulls.manifest(version)
        where = f"version {version} of '{nulls.name}'"
        if "cosine_mean" not in manifest.get("metrics", {}):
            _refuse_few_shared(manifest, where)
            raise ValueError(f"{where} was not measured against one before it: leave out the first, and gate mode off")
        if (manifest.get("model"), manifest["dim"]) != (served.get("model"), served["dim"]):
            raise ValueError(
                f"{where} is of model '{manifest.get('model')}' with dim {manifest['dim']}; '{collection.name}' serves "
                f"'{served.get('model')}' with dim {served['dim']}: calibrate with refreshes of the served model"
            )
        measured.append(manifest["metrics"])
    calibration = calibrated(
        measured,
        model=served.get("model") or "",
        overrides=overrides,
        source=[f"{nulls.name}/{version}" for version in versions],
    )
    if only_nulls:
        _refuse_served(nulls, versions)
    collection.save_settings(SETTINGS, settings_name(calibration.model), calibration.as_document())
    return calibration


def _refuse_names(versions: Sequence[str]) -> None:
    """Raise ValueError for what is no version's own name, and for versions that are named more than once."""
    odd = sorted({version for version in versions if not VERSION_PATTERN.fullmatch(version)})
    if odd:
        named = ", ".join(map(repr, odd[:5]))
        raise ValueError(f"versions: {named}: not the names of versions: name each null by its own, such as v000002")
    twice = sorted(version for version, times in Counter(versions).items() if times > 1)
    if twice:
        named = ", ".join(twice[:5])
        raise ValueError(f"versions: {named}: named more than once: one null says nothing of how far nulls differ")


def _refuse_few_shared(manifest: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a version was not measured because it has too few items in common with the one before it."""
    for check in manifest["gate"]:
        if check["metric"] == "shared" and check["verdict"] == "fail":
            raise ValueError(
                f"{where} shares {check['value']:g} items with the one before it, where {check['threshold']:g} are "
                f"needed for vectors of dim {manifest['dim']}: refresh more items, or lower model.embedding_dim"
            )


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
