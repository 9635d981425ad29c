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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from embeddings.refresh import probe
from embeddings.refresh.diagnosis import diagnose, stale
from embeddings.refresh.eligibility import eligible_rows
from embeddings.refresh.gate import Check, Thresholds, Verdict
from embeddings.refresh.gate_checks.base import Metrics
from embeddings.refresh.gate_checks.comparison import Comparison, Sampling, live_rows
from embeddings.refresh.gate_run import Assessment, assess
from embeddings.refresh.generation import Alignment, Generation, anchor_cosine, drift_anchor, drift_from
from embeddings.refresh.held_versions import held_in_a_row
from embeddings.refresh.holding import Before, hold_or_release
from embeddings.refresh.leaving import Leaving
from embeddings.refresh.merge import Plan, plan
from embeddings.refresh.procrustes import Rotated
from embeddings.refresh.served_rows import ServedRows
from embeddings.refresh.settings import (
    MAX_HELD,
    EvidenceSettings,
    Expiry,
    Gate,
    MovingAverage,
    Promote,
    PublishSettings,
    Settings,
    View,
    ViewSettings,
)
from embeddings.refresh.windows import shorter_than_before
from embeddings.store import Collection, IdsErased, StaleParent, Store, StoreError, VersionReader, ViewExists
from embeddings.store.views import PARAMETERS, default_view
from embeddings.vectors.item_vectors import UNCERTAIN, Array, ItemVectors, shared_rows
from embeddings.vectors.lazy_rows import Picked

__all__ = [
    "Expiry",
    "Gate",
    "MovingAverage",
    "Promote",
    "Publication",
    "Settings",
    "View",
    "last_step",
    "publish_candidate",
]

NORM_FLOOR = 1e-12
KEEP_LAST = 30
ATTEMPTS = 3
SECONDS_PER_DAY = 86_400
TRAINING_STEP = "training_step"
"""Of the manifest of a version whose job publishes several times: the step that it is of."""


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
        diagnosis: what failed, by how much and why (embeddings.refresh.diagnosis), None where nothing did.
        held_in_a_row: how many versions are held now since the one served was switched to; 0 where it is published.
        held_since: when the first of these was held.
        max_held: how many of them call somebody.
        released: what the user's rule let through (embeddings.refresh.holding), None where it was not asked.
    """

    status: Literal["published", "held"]
    collection: str
    version: str | None
    reasons: list[str]
    gate: list[dict[str, Any]]
    metrics: Metrics
    anchor_generation: int
    anchor_cosine: float | None = None
    diagnosis: dict[str, Any] | None = None
    held_in_a_row: int = 0
    held_since: str | None = None
    max_held: int = MAX_HELD
    released: dict[str, Any] | None = None


# --- publishing -------------------------------------------------------------------------------------------------------


def publish_candidate(
    store: Store,
    collection: str,
    candidate: ItemVectors,
    publish: PublishSettings,
    *,
    job_id: str | None = None,
    parent_version: str | None = None,
    start_version: str | None = None,
    model: str = "",
    thresholds: Thresholds | None = None,
    norm_floor: float = NORM_FLOOR,
    keep_last: int | None = KEEP_LAST,
    seed: int = 0,
    retired: Any = (),
    today: int | None = None,
    fence: Callable[[], None] | None = None,
    lineage: Mapping[str, Any] | None = None,
    training_step: int | None = None,
) -> Publication:
    """Refresh a collection with a run's item rows: publish them, or hold them and leave what is served alone.

    A run that was overtaken is held. Calling again for a ``job_id`` that wrote a version for the same parent brings
    that one to its end and returns it: a retried run publishes once. A job that publishes while it trains gives the
    step that each candidate is of (``training_step``), and then it is the version of that step that is brought to its
    end.

    The only entry to the stage, so it takes all that any caller says of a run; most are left out.

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
        start_version: the held version whose rows the run went on from, None where it started from what is served.
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
        training_step: of a job that publishes several times, after how many of its steps the candidate was taken; its
            ``parent_version`` is the one that is served now.

    Raises:
        StoreFull: the disk, quota or file size limit ended a write.
        StoreBusy: another process kept the collection's writer lock for too long.
        CorruptStore: a file of the store is damaged.
        ValueError: vectors that do not fit the collection's id type.
    """
    target = store.collection(collection)
    earlier = _earlier_end(target, job_id, parent_version, publish.gate.mode, training_step)
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
    refresh = _Refresh(
        target, parent, candidate, publish, job_id, start_version, model, thresholds, norm_floor, seed, retired,
        int(time.time()) // SECONDS_PER_DAY if today is None else today, lineage, training_step,
    )  # fmt: skip
    for attempt in range(1, ATTEMPTS + 1):
        try:
            written = refresh.write()
            break
        except IdsErased:
            # By somebody, while the version was being written.
            if attempt == ATTEMPTS:
                raise
    return written if isinstance(written, Publication) else _conclude(target, written, keep_last, fence)


@dataclass(frozen=True)
class _Refresh:
    """One candidate on its way to a written version: the arguments of ``publish_candidate``, and the parent."""

    target: Collection
    parent: VersionReader | None
    candidate: ItemVectors
    publish: PublishSettings
    job_id: str | None
    start_version: str | None
    model: str
    thresholds: Thresholds | None
    norm_floor: float
    seed: int
    retired: Any
    today: int
    lineage: Mapping[str, Any] | None
    training_step: int | None

    def write(self) -> str | Publication:
        """Take the candidate through the steps up to a written version, and return its name.

        Where it ends before that, return the result instead.
        """
        target, parent, publish = self.target, self.parent, self.publish
        erased = target.erased()
        allowed = ~erased.matches(self.candidate.keys)
        live = live_rows(self.candidate) & allowed
        candidate = replace(self.candidate, evidence=eligible_rows(self.candidate, self.norm_floor) & allowed)
        generation = Generation.of(target, parent, candidate, self.model)
        previous = parent.items() if parent is not None and generation.continues else None
        leaving = Leaving.of(parent, previous, candidate, self.retired, erased, publish.expire, self.today)
        alignment = Alignment.of(target, parent, candidate, publish, generation)
        aligned = replace(candidate, vectors=Rotated(candidate.vectors, alignment.rotation))
        assessment = self._assess(previous, aligned, live, leaving, generation)

        served = plan(
            previous, candidate.keys, candidate.evidence, allowed, leaving.all, self.today,
            few=_few(candidate, publish.evidence),
        )  # fmt: skip
        if not len(served):
            return _nothing(target.name, ["no item has a vector: check the training data", *assessment.verdict.reasons])
        hold_for = _create_views(target, publish.views, candidate.dim, generation.number)
        held = held_in_a_row(target)
        before = self._against_held(held, aligned, live, generation)
        holding = hold_or_release(assessment.verdict, publish.gate, hold_for, len(held), before)
        diagnosis = diagnose(assessment.verdict.checks, self.lineage)
        rows = ServedRows(
            served, candidate.vectors, alignment.rotation, None if previous is None else previous.vectors, publish.ema
        )
        extra = {
            "model": self.model,
            "lineage": None if self.lineage is None else dict(self.lineage),
            "new": served.num_new,
            "uncertain": int(np.count_nonzero(served.statuses == UNCERTAIN)),
            "retired": int(np.count_nonzero(leaving.retired)),
            "expired": int(np.count_nonzero(leaving.expired & ~leaving.retired)),
            "erased": int(np.count_nonzero(~allowed)),
            "gate_mode": publish.gate.mode,
            "drift_from": drift_from(target, parent, generation),
            **assessment.record,
            "metrics": {name: value for name, value in assessment.metrics.items() if np.isfinite(value)},
            "max_held": publish.gate.max_held,
            **holding.record,
            "diagnosis": None if diagnosis is None else diagnosis.as_dict(),
            "hold_for": holding.hold_for,
            "remarks": assessment.verdict.reasons,
            **({} if self.training_step is None else {TRAINING_STEP: self.training_step}),
        }
        return target.write(
            _items_served(served, rows, previous, candidate),
            parent=None if parent is None else parent.version,
            job=self.job_id,
            anchor_generation=generation.number,
            anchor_version=generation.anchor_version,
            missing=served.num_missing,
            alignment=partial(self._alignment_record, alignment, generation, previous, rows),
            gate=[check.as_dict() for check in assessment.verdict.checks],
            extra=extra,
            rotation=alignment.rotation,
        )

    def _assess(
        self,
        previous: ItemVectors | None,
        aligned: ItemVectors,
        live: Array,
        leaving: Leaving,
        generation: Generation,
    ) -> Assessment:
        if self.publish.gate.mode == "off":
            return Assessment(Verdict(), {}, {})
        probes = {} if previous is None else probe.probes_of(self.target, generation.number)
        if previous is not None and leaving.all.any():
            previous = _rows_of(previous, np.flatnonzero(~leaving.all))
        comparison = Comparison(
            previous, aligned, live, probes, Sampling(self.seed), self.publish.evidence.min_count,
            drift_anchor(self.target, self.parent, generation),
            {} if previous is None or self.parent is None else self.parent.manifest.extra.get("metrics") or {},
            shorter_than_before(self.target, None if self.parent is None else self.parent.version, self.lineage),
        )  # fmt: skip
        return self._assessed(comparison, generation.checks)

    def _assessed(self, comparison: Comparison, checks: tuple[Check, ...] = ()) -> Assessment:
        return assess(
            self.target,
            comparison,
            model=self.model,
            thresholds=self.thresholds,
            limits=self.publish.gate.limits,
            checks=checks,
        )

    def _against_held(
        self, held: Sequence[dict[str, Any]], aligned: ItemVectors, live: Array, generation: Generation
    ) -> Before | None:
        """Measure the candidate against the version held before it, or the one that its run went on from."""
        names = [one["version"] for one in held if one["anchor_generation"] == generation.number]
        version = self.start_version if self.start_version in names else names[-1] if names else None
        if version is None or not generation.continues or self.publish.gate.mode == "off":
            return None
        try:
            held_items = self.target.open(version).items()
        except StoreError:
            # What nobody is served is no reason to fail: there is nothing to have settled against.
            return None
        comparison = Comparison(
            held_items, aligned, live, sampling=Sampling(self.seed), min_count=self.publish.evidence.min_count,
            shorter=shorter_than_before(self.target, version, self.lineage),
        )  # fmt: skip
        verdict = self._assessed(comparison).verdict
        return Before(version, tuple(verdict.failed), is_start=version == self.start_version)

    def _alignment_record(
        self,
        alignment: Alignment,
        generation: Generation,
        previous: ItemVectors | None,
        rows: ServedRows,
        written: ItemVectors,
    ) -> dict[str, Any]:
        """Return the manifest's ``alignment``, once all ``rows`` are ``written``."""
        ema = self.publish.ema
        return {
            "kind": alignment.kind,
            "onto": alignment.onto,
            "shared": generation.num_shared,
            "new_weight": None if ema is None or previous is None else ema.new_weight,
            "reset": int(np.count_nonzero(rows.reset)),
            "anchor_cosine_mean": anchor_cosine(self.target, previous, written, generation),
            "note": alignment.note,
        }


def _conclude(target: Collection, version: str, keep_last: int | None, fence: Callable[[], None] | None) -> Publication:
    """Publish or hold a written version, as its manifest says; return the same again where that happened already."""
    manifest, overtaken = target.manifest(version), None
    if manifest["state"] == "candidate":
        reasons = list(manifest["hold_for"])
        if not reasons:
            if fence is not None:
                fence()
            try:
                target.publish(version, manifest["parent"])
            except StaleParent as error:
                reasons, overtaken = [str(error)], stale(str(error)).as_dict()
        if reasons:
            target.hold(version, reasons)
        elif keep_last is not None:
            target.retain(keep_last)
        manifest = target.manifest(version)
    held = manifest["state"] == "held"
    row = held_in_a_row(target) if held else []
    return Publication(
        "held" if held else "published",
        target.name,
        version,
        manifest["reasons"] if held else manifest["remarks"],
        manifest["gate"],
        manifest["metrics"],
        manifest["anchor_generation"],
        manifest["alignment"]["anchor_cosine_mean"],
        overtaken or manifest.get("diagnosis"),
        len(row),
        row[0]["created_at"] if row else None,
        manifest.get("max_held", MAX_HELD),
        None if held else manifest.get("released"),
    )


def last_step(store: Store, collection: str, job_id: str, fence: Callable[[], None] | None = None) -> int:
    """Return the last training step whose vectors a job that publishes several times has brought to an end.

    A version that it has written and neither published nor held is brought to its end first. -1 where it has none.

    Args:
        store: the store of the collection.
        collection: its name.
        job_id: the job.
        fence: called before the switch; what it raises leaves the version a candidate.
    """
    target = store.collection(collection)
    written = [m for m in target.versions() if m["job"] == job_id and m.get(TRAINING_STEP) is not None]
    for manifest in written:
        if manifest["state"] == "candidate":
            _conclude(target, manifest["version"], KEEP_LAST, fence)
    return max((int(m[TRAINING_STEP]) for m in written), default=-1)


def _earlier_end(
    target: Collection, job_id: str | None, parent_version: str | None, gate_mode: str, training_step: int | None
) -> str | None:
    """Return the version that an earlier attempt of this job wrote for this parent, or of this step, if there is one.

    A version that a gate held does not count if the job has since been given another gate mode.
    """
    if job_id is None:
        return None
    written = [m for m in target.versions() if m["job"] == job_id and m.get(TRAINING_STEP) == training_step]
    if training_step is None:
        written = [m for m in written if m["parent"] == parent_version]
    ended = [m["version"] for m in written if m["state"] != "held" or m["gate_mode"] == gate_mode]
    return ended[-1] if ended else None


# --- items of the candidate and of the parent ------------------------------------------------------------------------


def _items_served(served: Plan, rows: ServedRows, previous: ItemVectors | None, candidate: ItemVectors) -> ItemVectors:
    """Return the items of the version, whose vectors are ``rows``."""
    return ItemVectors(
        served.keys,
        rows,
        norms=served.pick(candidate.norms, None if previous is None else previous.norms),
        counts=_counts(served, previous, candidate),
        statuses=served.statuses,
        carried_for=served.carried_for,
        last_found=served.last_found,
    )


def _few(candidate: ItemVectors, evidence: EvidenceSettings) -> Array | None:
    """Return which items are to be marked as uncertain unless they were known better, bool [n]; None for none."""
    if not evidence.mark_uncertain or candidate.counts is None:
        return None
    few: Array = candidate.counts < evidence.min_count
    return few


def _counts(served: Plan, previous: ItemVectors | None, candidate: ItemVectors) -> Array | None:
    """Return occurrences in this run's training, also of items that are carried; None where unknown."""
    if candidate.counts is None:
        return None
    if previous is None or not (served.found_rows < 0).any():
        return candidate.counts[served.found_rows]
    of_parent = np.zeros(len(previous), dtype=np.int64)
    old, new = shared_rows(previous.keys, candidate.keys)
    of_parent[old] = candidate.counts[new]
    return served.pick(candidate.counts, of_parent)


def _rows_of(items: ItemVectors, rows: Array) -> ItemVectors:
    """Return some rows, whose vectors are not copied."""
    counts = None if items.counts is None else items.counts[rows]
    return ItemVectors(
        items.keys[rows], Picked(items.vectors, rows), norms=items.norms[rows], evidence=items.evidence[rows],
        counts=counts, statuses=items.statuses[rows],
        carried_for=None if items.carried_for is None else items.carried_for[rows],
    )  # fmt: skip


# --- views and ends --------------------------------------------------------------------------------------------------


def _create_views(target: Collection, views: Sequence[ViewSettings], dim: int, generation: int) -> list[str]:
    """Create the default view and the views asked for; return why not, for views that cannot be."""
    views_of_run: list[ViewSettings] = list(views)
    default = default_view(target.name)
    if default not in {view.name for view in views_of_run} and not target.has_view(default, generation):
        views_of_run.insert(0, View(default))
    problems = []
    for view in views_of_run:
        try:
            target.create_view(
                view.name, **{name: getattr(view, name) for name in PARAMETERS},
                dim_in=dim, anchor_generation=generation, materialized=view.materialized,
            )  # fmt: skip
        except ViewExists as error:
            problems.append(str(error))
    return problems


def _nothing(collection: str, reasons: list[str]) -> Publication:
    return Publication("held", collection, None, reasons, [], {}, 0)
