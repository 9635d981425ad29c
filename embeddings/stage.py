"""From a run's raw item rows to a published version: the one place that decides what consumers are served.

The order is the method: direction -> align onto the version that was current when the job started -> gate the aligned
candidate -> moving average -> views -> publish. The gate comes before the average because the average hides faults, and
the switch is fenced: if another version became current in the meantime the candidate is held, since it was aligned onto
one that nobody is served any more. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embeddings.align import TooFewShared, min_shared, procrustes, rotate
from embeddings.stability import (
    Check,
    Metrics,
    Thresholds,
    Verdict,
    compare,
    cosines_of,
    decide,
    live_rows,
    usable_rows,
)
from embeddings.stage_settings import (
    AverageSettings,
    Gate,
    MovingAverage,
    PublishSettings,
    Settings,
    View,
    ViewSettings,
)
from embeddings.store import Collection, StaleParent, Store, StoreError, VersionReader, ViewExists
from embeddings.store_views import default_view
from embeddings.vectors import CARRIED, FOUND, Array, ItemVectors, chunks, keys_of, shared_rows, unit_rows

__all__ = ["Gate", "MovingAverage", "Publication", "Settings", "View", "publish_candidate"]

NORM_FLOOR = 1e-12
KEEP_LAST = 30


# --- what is asked for and what came of it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Publication:
    """What came of it. ``status``: published or held. ``version``: the version written, None where there was nothing to
    write. ``reasons``: why it is held, each with what to do; under gate mode report also what failed. ``gate``: checks
    as {metric, value, threshold, bound, verdict, remedy}. ``metrics``: every measurement, gated or not."""

    status: Literal["published", "held"]
    collection: str
    version: str | None
    reasons: list[str]
    gate: list[dict[str, Any]]
    metrics: Metrics
    anchor_generation: int


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
) -> Publication:
    """Takes a run's item rows through the stage and publishes them, or holds them and leaves what is served alone.

    candidate: raw rows *without* pending decay (it is a scalar: direction stays, but a decayed row may be zero), with
    their idle momentum; ``norms`` as they would be served; ``evidence`` False for rows never touched; ``counts`` of
    training, for traffic weights and buckets. Rows without evidence, not finite, or of a norm up to ``norm_floor`` are
    carried from the parent, or missing. parent_version: the version that was current when the job *started*, None if
    there was none. A run that was overtaken is held. model: what besides dim decides the geometry (a model family's
    name); a change of it, of dim, or fewer than 12 d shared items begins a new anchor generation, which under
    ``enforce`` is held for somebody to promote. Calling again for a ``job_id`` that wrote a version for the same parent
    brings that one to its end and returns it: a retried run publishes once. ``keep_last``: versions that retention
    keeps after a publication, None for all. ``retired``: ids that training has given up (docs/adr/0010-growth.md); the
    parent's vectors of them are not carried on, unless the candidate has a row for them all the same. Raises StoreFull,
    StoreBusy, CorruptStore; ValueError for vectors that do not fit the collection's id type.
    """
    target = store.collection(collection)
    earlier = _earlier_end(target, job_id, parent_version, publish.gate.mode)
    if earlier is not None:
        return _conclude(target, earlier, keep_last)
    try:
        parent = None if parent_version is None else target.open(parent_version)
    except StoreError as error:
        return _nothing(collection, [f"parent version {parent_version} cannot be read, so this run is stale: {error}"])
    if parent is not None and parent.keys.dtype.kind != candidate.keys.dtype.kind:
        raise ValueError(
            f"collection '{collection}' has ids of type {parent.manifest['id_type']}, the candidate has others"
        )
    live = live_rows(candidate)
    candidate = _with_evidence(candidate, norm_floor)
    leaves = _leaving(parent, candidate, retired)
    generation = _Generation.of(target, parent, candidate, model)
    onto, rotation, note = _alignment(target, parent, candidate, publish, generation)
    aligned = _rotated(candidate, rotation)
    verdict, metrics = _gate(parent, leaves, aligned, live, generation, publish.gate.mode, thresholds, seed)

    items, num_missing, num_reset = _served(parent, leaves, aligned, generation, publish.ema)
    if items is None:
        return _nothing(collection, ["no item has a vector: check the training data", *verdict.reasons])
    blocked = _create_views(target, publish.views, items.dim, generation.number)
    alignment: dict[str, Any] = {
        "kind": "none" if onto is None else "procrustes" if rotation is not None else "identity",
        "onto": onto,
        "shared": generation.num_shared,
        "new_weight": None if publish.ema is None or not generation.continues else publish.ema.new_weight,
        "reset": num_reset,
        "anchor_cosine_mean": _anchor_cosine(target, parent, items, generation),
        "note": note,
    }
    reasons = blocked + (verdict.reasons if publish.gate.mode == "enforce" else [])
    version = target.write(
        items,
        parent=parent_version,
        job=job_id,
        anchor_generation=generation.number,
        anchor_version=generation.anchor_version,
        missing=num_missing,
        alignment=alignment,
        gate=[check.as_dict() for check in verdict.checks],
        extra={
            "model": model,
            "retired": int(np.count_nonzero(leaves)),
            "gate_mode": publish.gate.mode,
            "metrics": {name: value for name, value in metrics.items() if np.isfinite(value)},
            "hold_for": reasons,
            "remarks": verdict.reasons,
        },
        rotation=rotation,
    )
    return _conclude(target, version, keep_last)


def _conclude(target: Collection, version: str, keep_last: int | None) -> Publication:
    """Publishes or holds a written version, as its manifest says; the same again where that happened already."""
    manifest = target.manifest(version)
    if manifest["state"] == "candidate":
        reasons = list(manifest["hold_for"])
        if not reasons:
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
    )


def _earlier_end(target: Collection, job_id: str | None, parent_version: str | None, gate_mode: str) -> str | None:
    """The version that an earlier attempt of this job wrote for this parent; not one that was held by a gate which the
    job has been told otherwise about since."""
    if job_id is None:
        return None
    written = [m for m in target.versions() if m["job"] == job_id and m["parent"] == parent_version]
    ended = [m["version"] for m in written if m["state"] != "held" or m["gate_mode"] == gate_mode]
    return ended[-1] if ended else None


# --- evidence --------------------------------------------------------------------------------------------------------


def _with_evidence(candidate: ItemVectors, norm_floor: float) -> ItemVectors:
    """The candidate with evidence only where a row has a direction that means something."""
    usable, _ = usable_rows(candidate)
    for part in chunks(len(candidate)):
        with np.errstate(invalid="ignore"):
            usable[part] &= unit_rows(candidate.vectors[part])[1] > norm_floor
    return _with(candidate, evidence=usable)


def _with(items: ItemVectors, **changes: Any) -> ItemVectors:
    fields = {
        "ids": items.keys, "vectors": items.vectors, "norms": items.norms, "evidence": items.evidence,
        "counts": items.counts, "statuses": items.statuses,
    }  # fmt: skip
    return ItemVectors(**{**fields, **changes})


def _leaving(parent: VersionReader | None, candidate: ItemVectors, retired: Any) -> Array:
    """bool [items of the parent]: those that are retired, unless the candidate has a row for them."""
    leaves = np.zeros(0 if parent is None else len(parent), dtype=np.bool_)
    if parent is not None and len(retired):
        leaves[np.isin(parent.keys, keys_of(retired, query=True)) & ~np.isin(parent.keys, candidate.keys)] = True
    return leaves


# --- generation and alignment ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Generation:
    """Which coordinates the candidate will live in: those of the parent, or new ones."""

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
        old_model = manifest.get("model", model)
        checks = tuple(
            Check(metric, float(value), float(limit), at_most=False, remedy=f"{change}: {remedy}")
            for metric, value, limit, change in (
                ("same_dim", candidate.dim == parent.dim, 1, f"dim was {parent.dim}, is {candidate.dim}"),
                ("same_model", model == old_model, 1, f"model was '{old_model}', is '{model}'"),
                ("shared", num_shared, min_shared(parent.dim), "too few items that both have, to align on"),
            )
        )
        if all(check.verdict == "pass" for check in checks):
            return cls(manifest["anchor_generation"], True, manifest["anchor_version"], num_shared, checks)
        return cls(1 + _last_generation(target), False, None, num_shared, checks)


def _last_generation(target: Collection) -> int:
    """The highest generation there is; held versions use up numbers too, because views may be defined for them."""
    return max((manifest["anchor_generation"] for manifest in target.versions()), default=0)


def _shared(served: VersionReader, candidate: ItemVectors) -> tuple[Array, Array]:
    """Rows (in served, in candidate) of the items that both have found."""
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
    """(version aligned onto, R, remark). Without an average, versions chained one onto the next would drift, so the
    anchor generation's first version is what they are aligned onto."""
    if parent is None or not generation.continues:
        return None, None, None
    if not publish.align:
        return parent.version, None, "align: false"
    note = None
    if publish.ema is None and generation.anchor_version not in (None, parent.version):
        anchor = target.open(str(generation.anchor_version))
        old, new = _shared(anchor, candidate)
        try:
            rotation = procrustes(candidate.vectors, anchor.vectors, source_rows=new, target_rows=old)
            return anchor.version, rotation, None
        except TooFewShared as error:
            note = f"aligned onto the parent instead of the anchor {anchor.version}: {error}"
    old, new = _shared(parent, candidate)
    return parent.version, procrustes(candidate.vectors, parent.vectors, source_rows=new, target_rows=old), note


def _rotated(candidate: ItemVectors, rotation: Array | None) -> ItemVectors:
    return _with(candidate, vectors=rotate(candidate.vectors, rotation))


def _anchor_cosine(
    target: Collection, parent: VersionReader | None, items: ItemVectors, generation: _Generation
) -> float | None:
    """Mean cosine of what would be served to the anchor generation's first version, over the items both have found."""
    if parent is None or not generation.continues or generation.anchor_version is None:
        return None
    anchor = target.open(generation.anchor_version)
    old, new = _shared(anchor, _with(items, evidence=items.statuses == FOUND))
    if not len(old):
        return None
    return float(cosines_of(anchor.vectors, items.vectors, old, new).mean())


# --- gate, average, carrying -----------------------------------------------------------------------------------------


def _gate(
    parent: VersionReader | None,
    leaves: Array,
    aligned: ItemVectors,
    live: Array,
    generation: _Generation,
    mode: str,
    thresholds: Thresholds | None,
    seed: int,
) -> tuple[Verdict, Metrics]:
    if mode == "off":
        return Verdict(), {}
    previous = parent.items() if parent is not None and generation.continues else None
    if previous is not None and leaves.any():
        previous = _rows_of(previous, np.flatnonzero(~leaves))
    metrics = compare(previous, aligned, seed=seed, live=live)
    return Verdict((*generation.checks, *decide(metrics, thresholds).checks)), metrics


def _rows_of(items: ItemVectors, rows: Array) -> ItemVectors:
    counts = None if items.counts is None else items.counts[rows]
    return ItemVectors(
        items.keys[rows], items.vectors[rows], norms=items.norms[rows], evidence=items.evidence[rows], counts=counts,
        statuses=items.statuses[rows],
    )  # fmt: skip


def _served(
    parent: VersionReader | None,
    leaves: Array,
    aligned: ItemVectors,
    generation: _Generation,
    ema: AverageSettings | None,
) -> tuple[ItemVectors | None, int, int]:
    """(rows to serve or None, number of items without any, number of items whose average was reset)."""
    usable = aligned.evidence
    rows = np.flatnonzero(usable)
    vectors = aligned.vectors[rows]
    num_reset = 0
    if parent is None or not generation.continues:
        if not len(rows):
            return None, len(aligned), 0
        counts = None if aligned.counts is None else aligned.counts[rows]
        return (
            ItemVectors(aligned.keys[rows], vectors, norms=aligned.norms[rows], counts=counts),
            len(aligned) - len(rows),
            0,
        )

    old, new = shared_rows(parent.keys, aligned.keys[rows])
    if ema is not None:
        num_reset = _average(vectors, new, parent.vectors, old, ema)
    renewed = np.zeros(len(parent), dtype=np.bool_)
    renewed[old] = True
    kept = np.flatnonzero(~renewed & ~leaves)
    known, given = shared_rows(parent.keys, aligned.keys)
    num_missing = int(np.count_nonzero(~usable)) - int(np.count_nonzero(~usable[given]))
    counts = None
    if aligned.counts is not None:
        counts_of_parent = np.zeros(len(parent), dtype=np.int64)
        counts_of_parent[known] = aligned.counts[given]
        counts = np.concatenate([aligned.counts[rows], counts_of_parent[kept]])
    served = ItemVectors(
        np.concatenate([aligned.keys[rows], parent.keys[kept]]),
        np.concatenate([vectors, parent.vectors[kept]]),
        norms=np.concatenate([aligned.norms[rows], parent.norms[kept]]),
        counts=counts,
        statuses=np.concatenate([np.full(len(rows), FOUND, np.uint8), np.full(len(kept), CARRIED, np.uint8)]),
    )
    return served, num_missing, num_reset


def _average(vectors: Array, rows: Array, previous: Array, previous_rows: Array, ema: AverageSettings) -> int:
    """Averages ``vectors[rows]`` with ``previous[previous_rows]`` in place; how many took their new vector whole."""
    num_reset = 0
    for part in chunks(len(rows)):
        new, _ = unit_rows(vectors[rows[part]])
        old, _ = unit_rows(previous[previous_rows[part]])
        far = np.einsum("nd,nd->n", new, old) < ema.reset_below_cosine
        mixed, norms = unit_rows((1.0 - ema.new_weight) * old + ema.new_weight * new)
        # Opposite vectors can cancel: such an average has no direction.
        far |= norms < 1e-6
        vectors[rows[part]] = np.where(far[:, None], new, mixed)
        num_reset += int(np.count_nonzero(far))
    return num_reset


# --- views and ends --------------------------------------------------------------------------------------------------


def _create_views(target: Collection, views: Sequence[ViewSettings], dim: int, generation: int) -> list[str]:
    """Creates the default view and those asked for; why not, for those that cannot be."""
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
