"""From a run's raw item rows to a published version: the one place that decides what consumers are served.

The order is the method: direction -> align onto the version that was current when the job started -> gate the aligned
candidate -> moving average -> views -> publish. The gate comes before the average because the average hides faults, and
the switch is fenced: if another version became current in the meantime the candidate is held, since it was aligned onto
one that nobody is served any more.

Every step reads the candidate a few thousand rows at a time, and no step makes another array of its size: what is
aligned, averaged and carried is computed when it is read (:mod:`embeddings.vectors.lazy_rows`), by the gate and by the
writer of the version. What stays in memory is ids, flags and counts. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embeddings.refresh.eligibility import evidence_of
from embeddings.refresh.gate_metrics import Check, Metrics, Thresholds, Verdict, cosines_of, live_rows
from embeddings.refresh.gate_run import Assessment, assess
from embeddings.refresh.merge import expired, plan
from embeddings.refresh.procrustes import Rotated, TooFewShared, min_shared, procrustes
from embeddings.refresh.served_rows import ServedRows
from embeddings.refresh.settings import (
    Expiry,
    ExpirySettings,
    Gate,
    MovingAverage,
    PublishSettings,
    Settings,
    View,
    ViewSettings,
)
from embeddings.store import (
    Collection,
    CorruptStore,
    IdsErased,
    StaleParent,
    Store,
    StoreError,
    UnknownVersion,
    VersionReader,
    ViewExists,
)
from embeddings.store.tombstones import ErasedIds
from embeddings.store.views import default_view
from embeddings.vectors.item_vectors import FOUND, Array, ItemVectors, keys_of, shared_rows
from embeddings.vectors.lazy_rows import Picked

__all__ = ["Expiry", "Gate", "MovingAverage", "Publication", "Settings", "View", "publish_candidate"]

NORM_FLOOR = 1e-12
KEEP_LAST = 30
ATTEMPTS = 3
SECONDS_PER_DAY = 86_400


# --- what is asked for and what came of it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Publication:
    """The result of a publish step.

    Attributes:
        status: published or held.
        version: the version written, None where there was nothing to write.
        reasons: why it is held, each with what to do; under gate mode report also what failed.
        gate: checks as {metric, value, threshold, bound, verdict, remedy}.
        metrics: every measurement, gated or not.
        anchor_cosine: mean cosine to the anchor generation's first version, None where there is none before.
    """

    status: Literal["published", "held"]
    collection: str
    version: str | None
    reasons: list[str]
    gate: list[dict[str, Any]]
    metrics: Metrics
    anchor_generation: int
    anchor_cosine: float | None = None


# --- the stage -------------------------------------------------------------------------------------------------------


def publish_candidate(
    store: Store,
    collection: str,
    candidate: ItemVectors,
    publish: PublishSettings,
    *,
    job_id: str | None = None,
    parent_version: str | None = None,
    model: str = "",
    thresholds: Thresholds | None = None,
    norm_floor: float = NORM_FLOOR,
    keep_last: int | None = KEEP_LAST,
    seed: int = 0,
    retired: Any = (),
    today: int | None = None,
    fence: Callable[[], None] | None = None,
    lineage: Mapping[str, Any] | None = None,
) -> Publication:
    """Refresh a collection with a run's item rows: publish them, or hold them and leave what is served alone.

    A run that was overtaken is held. Calling again for a ``job_id`` that wrote a version for the same parent brings
    that one to its end and returns it: a retried run publishes once.

    Args:
        store: the store of the collection.
        collection: its name.
        candidate: raw rows *without* deferred decay (it is a scalar: direction stays, but a decayed row may be zero),
            with their deferred momentum; ``norms`` as they would be served; ``evidence`` False for rows never touched;
            ``counts`` of training, for traffic weights and buckets. Rows without evidence, not finite, or of a norm up
            to ``norm_floor`` are carried from the parent, or missing.
        publish: settings of average, gate, views and expiry.
        job_id: the job that the candidate is of.
        parent_version: the version that was current when the job *started*, None if there was none.
        model: what besides dim decides the geometry (a model family's name); a change of it, of dim, or fewer than 12 d
            shared items begins a new anchor generation, which under ``enforce`` is held for somebody to promote.
        thresholds: limits of the gate; left out: the collection's calibration, else the starting values.
        norm_floor: the largest norm of a row that counts as having no direction.
        keep_last: versions that retention keeps after a publication, None for all.
        seed: of the samples that are measured.
        retired: ids that training has given up (docs/adr/0010-growth.md); the parent's vectors of them are not carried
            on, unless the candidate has a row for them all the same.
        today: days since 1970-01-01 UTC, of the clock where left out; what ``publish.expire`` counts from.
        fence: called before the switch; what it raises leaves the version a candidate.
        lineage: what the run was made of, for the manifest.

    Raises:
        StoreFull: the disk, quota or file size limit ended a write.
        StoreBusy: another process kept the collection's writer lock for too long.
        CorruptStore: a file of the store is damaged.
        ValueError: vectors that do not fit the collection's id type.
    """
    target = store.collection(collection)
    earlier = _earlier_end(target, job_id, parent_version, publish.gate.mode)
    if earlier is not None:
        return _conclude(target, earlier, keep_last, fence)
    try:
        parent = None if parent_version is None else target.open(parent_version)
    except StoreError as error:
        return _nothing(collection, [f"parent version {parent_version} cannot be read, so this run is stale: {error}"])
    if parent is not None and parent.keys.dtype.kind != candidate.keys.dtype.kind:
        raise ValueError(
            f"collection '{collection}' has ids of type {parent.manifest.id_type}, the candidate has others"
        )
    today = int(time.time()) // SECONDS_PER_DAY if today is None else today
    for attempt in range(1, ATTEMPTS + 1):
        try:
            written = _write(
                target, parent, candidate, publish, job_id=job_id, model=model, thresholds=thresholds,
                norm_floor=norm_floor, seed=seed, retired=retired, today=today, lineage=lineage,
            )  # fmt: skip
            break
        except IdsErased:
            # By somebody, while the version was being written.
            if attempt == ATTEMPTS:
                raise
    return written if isinstance(written, Publication) else _conclude(target, written, keep_last, fence)


def _write(
    target: Collection,
    parent: VersionReader | None,
    candidate: ItemVectors,
    publish: PublishSettings,
    *,
    job_id: str | None,
    model: str,
    thresholds: Thresholds | None,
    norm_floor: float,
    seed: int,
    retired: Any,
    today: int,
    lineage: Mapping[str, Any] | None,
) -> str | Publication:
    """Take the candidate through the steps up to a written version, and return its name.

    Where it ends before that, return the result instead.
    """
    erased = target.erased()
    wanted = ~erased.matches(candidate.keys)
    live = live_rows(candidate) & wanted
    candidate = _with(candidate, evidence=evidence_of(candidate, norm_floor) & wanted)
    generation = _Generation.of(target, parent, candidate, model)
    previous = parent.items() if parent is not None and generation.continues else None
    leaving = _Leaving.of(parent, previous, candidate, retired, erased, publish.expire, today)
    onto, rotation, note = _alignment(target, parent, candidate, publish, generation)
    aligned = _with(candidate, vectors=Rotated(candidate.vectors, rotation))
    assessment = _gate(
        target, previous, leaving.all, aligned, live, generation, publish.gate.mode, thresholds, model, seed
    )
    verdict, metrics = assessment.verdict, assessment.metrics

    served = plan(previous, candidate.keys, candidate.evidence, wanted, leaving.all, today)
    if not len(served):
        return _nothing(target.name, ["no item has a vector: check the training data", *verdict.reasons])
    blocked = _create_views(target, publish.views, candidate.dim, generation.number)
    reasons = blocked + (verdict.reasons if publish.gate.mode == "enforce" else [])
    rows = ServedRows(served, candidate.vectors, rotation, None if previous is None else previous.vectors, publish.ema)
    items = ItemVectors(
        served.keys,
        rows,
        norms=served.pick(candidate.norms, None if previous is None else previous.norms),
        counts=_counts(served, previous, candidate),
        statuses=served.statuses,
        carried_for=served.carried_for,
        last_found=served.last_found,
    )

    def alignment(written: ItemVectors) -> dict[str, Any]:
        return {
            "kind": "none" if onto is None else "procrustes" if rotation is not None else "identity",
            "onto": onto,
            "shared": generation.num_shared,
            "new_weight": None if publish.ema is None or previous is None else publish.ema.new_weight,
            "reset": int(np.count_nonzero(rows.reset)),
            "anchor_cosine_mean": _anchor_cosine(target, previous, written, generation),
            "note": note,
        }

    return target.write(
        items,
        parent=None if parent is None else parent.version,
        job=job_id,
        anchor_generation=generation.number,
        anchor_version=generation.anchor_version,
        missing=served.num_missing,
        alignment=alignment,
        gate=[check.as_dict() for check in verdict.checks],
        extra={
            "model": model,
            "lineage": None if lineage is None else dict(lineage),
            "new": served.num_new,
            "retired": int(np.count_nonzero(leaving.retired)),
            "expired": int(np.count_nonzero(leaving.expired & ~leaving.retired)),
            "erased": int(np.count_nonzero(~wanted)),
            "gate_mode": publish.gate.mode,
            **assessment.record,
            "metrics": {name: value for name, value in metrics.items() if np.isfinite(value)},
            "hold_for": reasons,
            "remarks": verdict.reasons,
        },
        rotation=rotation,
    )


def _conclude(target: Collection, version: str, keep_last: int | None, fence: Callable[[], None] | None) -> Publication:
    """Publish or hold a written version, as its manifest says; return the same again where that happened already."""
    manifest = target.manifest(version)
    if manifest["state"] == "candidate":
        reasons = list(manifest["hold_for"])
        if not reasons:
            if fence is not None:
                fence()
            try:
                target.publish(version, manifest["parent"])
            except StaleParent as error:
                reasons = [str(error)]
        if reasons:
            target.hold(version, reasons)
        elif keep_last is not None:
            target.retain(keep_last)
        manifest = target.manifest(version)
    held = manifest["state"] == "held"
    return Publication(
        "held" if held else "published",
        target.name,
        version,
        manifest["reasons"] if held else manifest["remarks"],
        manifest["gate"],
        manifest["metrics"],
        manifest["anchor_generation"],
        manifest["alignment"]["anchor_cosine_mean"],
    )


def _earlier_end(target: Collection, job_id: str | None, parent_version: str | None, gate_mode: str) -> str | None:
    """Return the version that an earlier attempt of this job wrote for this parent, if there is one.

    A version that a gate held does not count if the job has since been given another gate mode.
    """
    if job_id is None:
        return None
    written = [m for m in target.versions() if m["job"] == job_id and m["parent"] == parent_version]
    ended = [m["version"] for m in written if m["state"] != "held" or m["gate_mode"] == gate_mode]
    return ended[-1] if ended else None


# --- items of the candidate and of the parent ------------------------------------------------------------------------


def _with(items: ItemVectors, **changes: Any) -> ItemVectors:
    fields = {
        "ids": items.keys, "vectors": items.vectors, "norms": items.norms, "evidence": items.evidence,
        "counts": items.counts, "statuses": items.statuses,
    }  # fmt: skip
    return ItemVectors(**{**fields, **changes})


@dataclass(frozen=True)
class _Leaving:
    """Items of the parent that are not carried on, bool [items of the parent] each.

    Three kinds: items that training gave up, items that have been carried for too long, and items that are being erased
    at this moment.
    """

    retired: Array
    expired: Array
    erased: Array

    @classmethod
    def of(
        cls,
        parent: VersionReader | None,
        previous: ItemVectors | None,
        candidate: ItemVectors,
        retired: Any,
        erased: ErasedIds,
        expiry: ExpirySettings | None,
        today: int,
    ) -> _Leaving:
        tombstones = np.zeros(0 if parent is None else len(parent), dtype=np.bool_)
        if parent is None:
            return cls(tombstones, tombstones, tombstones)
        old, new = shared_rows(parent.keys, candidate.keys)
        if len(retired):
            tombstones |= np.isin(parent.keys, keys_of(retired, query=True))
            tombstones[old] = False
        renewed = np.zeros(len(parent), dtype=np.bool_)
        renewed[old] = candidate.evidence[new]
        gone = np.zeros_like(tombstones) if previous is None else expired(previous, renewed, expiry, today)
        return cls(tombstones, gone, erased.matches(parent.keys))

    @property
    def all(self) -> Array:
        return self.retired | self.expired | self.erased


def _counts(served: Any, previous: ItemVectors | None, candidate: ItemVectors) -> Array | None:
    """Return occurrences in this run's training, also of items that are carried; None where unknown."""
    if candidate.counts is None:
        return None
    if previous is None or not (served.found_rows < 0).any():
        return candidate.counts[served.found_rows]
    of_parent = np.zeros(len(previous), dtype=np.int64)
    old, new = shared_rows(previous.keys, candidate.keys)
    of_parent[old] = candidate.counts[new]
    return served.pick(candidate.counts, of_parent)


# --- generation and alignment ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Generation:
    """The coordinates that the candidate will live in: those of the parent, or new ones."""

    number: int
    continues: bool
    anchor_version: str | None
    num_shared: int
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, target: Collection, parent: VersionReader | None, candidate: ItemVectors, model: str) -> _Generation:
        if parent is None:
            return cls(1 + _last_generation(target), False, None, 0, ())
        remedy = (
            "this begins a new anchor generation, in which no consumer of today's views can read: if that is meant, "
            "promote it with a reason and override_gate, and retrain the consumers"
        )
        manifest = parent.manifest
        num_shared = len(_shared(parent, candidate)[0])
        old_model = manifest.extra.get("model", model)
        checks = tuple(
            Check(metric, float(value), float(limit), at_most=False, remedy=f"{change}: {remedy}")
            for metric, value, limit, change in (
                ("same_dim", candidate.dim == parent.dim, 1, f"dim was {parent.dim}, is {candidate.dim}"),
                ("same_model", model == old_model, 1, f"model was '{old_model}', is '{model}'"),
                ("shared", num_shared, min_shared(parent.dim), "too few items that both have, to align on"),
            )
        )
        if all(check.verdict == "pass" for check in checks):
            return cls(manifest.anchor_generation, True, manifest.anchor_version, num_shared, checks)
        return cls(1 + _last_generation(target), False, None, num_shared, checks)


def _last_generation(target: Collection) -> int:
    """Return the highest generation; held versions use up numbers too, because views may be defined for them."""
    return max((manifest["anchor_generation"] for manifest in target.versions()), default=0)


def _shared(served: VersionReader, candidate: ItemVectors) -> tuple[Array, Array]:
    """Return rows (in served, in candidate) of the items that both have found."""
    old, new = shared_rows(served.keys, candidate.keys)
    both = (served.statuses[old] == FOUND) & candidate.evidence[new]
    return old[both], new[both]


def _alignment(
    target: Collection,
    parent: VersionReader | None,
    candidate: ItemVectors,
    publish: PublishSettings,
    generation: _Generation,
) -> tuple[str | None, Array | None, str | None]:
    """Return (version aligned onto, R, remark).

    Without an average, versions chained one onto the next would drift, so they are aligned onto the anchor generation's
    first version.
    """
    if parent is None or not generation.continues:
        return None, None, None
    if not publish.align:
        return parent.version, None, "align: false"
    note = None
    if publish.ema is None and generation.anchor_version not in (None, parent.version):
        try:
            anchor = target.open(str(generation.anchor_version))
            old, new = _shared(anchor, candidate)
            rotation = procrustes(candidate.vectors, anchor.items().vectors, source_rows=new, target_rows=old)
            return anchor.version, rotation, None
        except (TooFewShared, UnknownVersion) as error:
            note = f"aligned onto the parent instead of the anchor {generation.anchor_version}: {error}"
    old, new = _shared(parent, candidate)
    rotation = procrustes(candidate.vectors, parent.items().vectors, source_rows=new, target_rows=old)
    return parent.version, rotation, note


def _anchor_cosine(
    target: Collection, previous: ItemVectors | None, written: ItemVectors, generation: _Generation
) -> float | None:
    """Return the mean cosine of what is to be served to the anchor generation's first version.

    It is over the items that both have found.
    """
    if previous is None or generation.anchor_version is None:
        return None
    try:
        anchor = target.open(generation.anchor_version)
    except (CorruptStore, UnknownVersion):
        # A figure for people: nothing is held, and nothing fails, for want of it.
        return None
    old, new = _shared(anchor, written)
    if not len(old):
        return None
    return float(cosines_of(anchor.items().vectors, written.vectors, old, new).mean())


# --- gate -------------------------------------------------------------------------------------------------------------


def _gate(
    target: Collection,
    previous: ItemVectors | None,
    leaves: Array,
    aligned: ItemVectors,
    live: Array,
    generation: _Generation,
    mode: str,
    thresholds: Thresholds | None,
    model: str,
    seed: int,
) -> Assessment:
    if mode == "off":
        return Assessment(Verdict(), {}, {})
    if previous is not None and leaves.any():
        previous = _rows_of(previous, np.flatnonzero(~leaves))
    return assess(
        target, previous, aligned, anchor_generation=generation.number, model=model, live=live, thresholds=thresholds,
        checks=generation.checks, seed=seed,
    )  # fmt: skip


def _rows_of(items: ItemVectors, rows: Array) -> ItemVectors:
    """Return some rows, whose vectors are not copied."""
    counts = None if items.counts is None else items.counts[rows]
    return ItemVectors(
        items.keys[rows], Picked(items.vectors, rows), norms=items.norms[rows], evidence=items.evidence[rows],
        counts=counts, statuses=items.statuses[rows],
    )  # fmt: skip


# --- views and ends --------------------------------------------------------------------------------------------------


def _create_views(target: Collection, views: Sequence[ViewSettings], dim: int, generation: int) -> list[str]:
    """Create the default view and the views asked for; return why not, for views that cannot be."""
    wanted: list[ViewSettings] = list(views)
    default = default_view(target.name)
    if default not in {view.name for view in wanted} and not target.has_view(default, generation):
        wanted.insert(0, View(default))
    problems = []
    for view in wanted:
        try:
            target.create_view(
                view.name, kind=view.kind, dim=view.dim, sigma=view.sigma, seed=view.seed, frequencies=view.frequencies,
                dim_in=dim, anchor_generation=generation, materialized=view.materialized,
            )  # fmt: skip
        except ViewExists as error:
            problems.append(str(error))
    return problems


def _nothing(collection: str, reasons: list[str]) -> Publication:
    return Publication("held", collection, None, reasons, [], {}, 0)
