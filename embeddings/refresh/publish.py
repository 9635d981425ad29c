"""From a run's raw item rows to a published version: the one place that decides what consumers are served.

The order of the steps matters: take directions, align onto the version that was current when the job started, judge
the aligned candidate by the gate, apply the moving average, make views, publish. The gate comes before the average
because the average hides faults. If another version became current in the meantime, the candidate is held, since it was
aligned onto a version that is no longer served.

Every step reads the candidate a few thousand rows at a time, and no step makes another array of its size. Aligned,
averaged and carried rows are computed when the gate or the writer of the version reads them
(:mod:`embeddings.vectors.lazy_rows`). Only ids, flags and counts stay in memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from embeddings.refresh import probe
from embeddings.refresh.backward_maps import backward_maps
from embeddings.refresh.diagnosis import diagnose
from embeddings.refresh.gate import Limits, Metrics, Verdict, decide
from embeddings.refresh.gate_checks.comparison import Comparison, Sampling, live_rows
from embeddings.refresh.gate_checks.row_figures import ROW_FIGURES
from embeddings.refresh.gate_metrics import measure
from embeddings.refresh.generation import (
    Alignment,
    Generation,
    anchor_cosine,
    drift_anchor,
    drift_from,
    same_coordinates,
)
from embeddings.refresh.held_versions import held_in_a_row
from embeddings.refresh.hold_policy import hold_or_release
from embeddings.refresh.merge import Plan, RemovedItems, eligible_rows, plan
from embeddings.refresh.model_comparison import ModelComparison
from embeddings.refresh.procrustes import Rotated, Turned
from embeddings.refresh.publication import KEEP_LAST, Publication, conclude, earlier_end, nothing_written
from embeddings.refresh.record import RefreshRecord
from embeddings.refresh.scratch import is_scratch
from embeddings.refresh.served_rows import ServedRows, few_occurrences, items_served
from embeddings.refresh.settings import Expiry, Gate, MovingAverage, Settings, View
from embeddings.refresh.usual import usual_metrics
from embeddings.refresh.windows import shorter_than_before
from embeddings.store import Collection, IdsErased, Store, StoreError, StoreUnavailable, VersionReader, ViewExists
from embeddings.store.collection.erasure import ERASED_FILES, USERS
from embeddings.store.generation_maps import GenerationMap
from embeddings.store.views import PARAMETERS, default_view, raw_view
from embeddings.vectors.item_vectors import UNCERTAIN, Array, ItemVectors
from embeddings.vectors.lazy_rows import Vectors
from embeddings.vectors.user_vectors import UserVectors

__all__ = ["Expiry", "Gate", "MovingAverage", "RefreshRequest", "Settings", "View", "publish_candidate"]

NORM_FLOOR = 1e-12
ATTEMPTS = 3
SECONDS_PER_DAY = 86_400
QUALITY_BEFORE = ("metric", "validation", "test")
"""Entries of the parent's ``quality`` that a version repeats."""


@dataclass(frozen=True)
class RefreshRequest:
    """A run's item rows and facts about the run; most arguments have defaults.

    Attributes:
        candidate: raw rows with deferred momentum but *without* deferred decay, which keeps a row's direction but may
            turn the row to zero. ``norms`` are those to be served; ``evidence`` is False for rows never touched;
            ``counts`` are occurrences in training. Rows without evidence, not finite, or with a norm up to
            ``norm_floor`` are carried from the parent, or missing.
        parent_version: the version that was current when the job *started*, None if there was none. For a job that
            publishes several times it is the version served now.
        start_version: the held version whose rows the run continued from; None if it started from the served version.
        model: name of the model family, which together with dim determines the geometry. A new anchor generation
            begins if it or dim changes, or if alignment is on and fewer than 12 d items are shared. Under ``enforce``
            the gate holds such a version until somebody promotes it.
        keep_last: number of versions that retention keeps after a publication, None for all.
        seed: seed of the samples on which the gate measures.
        retired: ids that training has given up (docs/adr/0045). Their vectors are not carried on from the parent,
            unless the candidate has a row for them.
        today: today, in days since 1970-01-01 UTC, for ``publish.expire``.
        fence: function called before the switch; if it raises, the version stays a candidate.
        training_step: for a job that publishes several times, the number of its steps before the candidate was taken.
        models: comparison of the run's model with the served one on held-out rows; None: they were not compared.
        remedies: what to do about a failed check, by metric, where the job's kind decides it.
        quality: held-out metric of the model in the published epoch (trainer.runs.published_epoch); None: unknown.
        proposed_canary: text that proposes a probe; kept if the collection has none.
        users: users in the coordinates of ``candidate``, with every part of a score except the items; None: only items.
    """

    candidate: ItemVectors
    publish: Settings
    _: KW_ONLY
    job_id: str | None = None
    parent_version: str | None = None
    start_version: str | None = None
    model: str = ""
    norm_floor: float = NORM_FLOOR
    keep_last: int | None = KEEP_LAST
    seed: int = 0
    retired: Any = ()
    today: int = field(default_factory=lambda: int(time.time()) // SECONDS_PER_DAY)
    fence: Callable[[], None] | None = None
    lineage: Mapping[str, Any] | None = None
    training_step: int | None = None
    models: ModelComparison | None = None
    remedies: Mapping[str, str] = field(default_factory=dict)
    quality: Mapping[str, Any] | None = None
    proposed_canary: str | None = None
    users: UserVectors | None = None
    users_feature: str = "user"


def publish_candidate(store: Store, collection: str, request: RefreshRequest) -> Publication:
    """Refresh a collection with a run's item rows: publish them as a new version, or hold that version.

    It is also held if another version became current since the run started. A retried run publishes once: a second call
    with the same ``job_id`` and parent finishes and returns the version that the first call wrote. A job that publishes
    while it trains sets ``training_step``; then a second call finishes the version of that step.

    Raises:
        StoreFull: the disk, quota or file size limit ended a write.
        StoreBusy: another process held the collection's writer lock for too long.
        StoreUnavailable: the store's server cannot be reached.
        CorruptStore: a file of the store is damaged.
        ValueError: vectors that do not fit the collection's id type.
    """
    if is_scratch(collection):
        # A scratch collection is not served, and may hold ids that were erased from the served collection.
        why = f"'{collection}' has the name of a scratch collection of null refreshes, which the gate no longer needs"
        return nothing_written(collection, [f"{why}: publish to a collection of another name"])
    target = store.collection(collection)
    earlier = earlier_end(
        target, request.job_id, request.parent_version, request.publish.gate.mode, request.training_step
    )
    if earlier is not None:
        return conclude(target, earlier, request.keep_last, request.fence)
    try:
        parent = None if request.parent_version is None else target.open(request.parent_version)
    except StoreUnavailable:
        # The parent may be intact, so the run is retried with the rows that it has trained.
        raise
    except StoreError as error:
        return nothing_written(
            collection, [f"parent version {request.parent_version} cannot be read, so this run is stale: {error}"]
        )
    if parent is not None and parent.keys.dtype.kind != request.candidate.keys.dtype.kind:
        raise ValueError(
            f"collection '{collection}' has ids of type {parent.manifest.id_type}, the candidate has others"
        )
    for attempt in range(1, ATTEMPTS + 1):
        try:
            written = _Refresh(target, parent, request).write()
            break
        except IdsErased:
            # Ids were erased while the version was being written.
            if attempt == ATTEMPTS:
                raise
    if isinstance(written, Publication):
        return written
    return conclude(target, written, request.keep_last, request.fence)


@dataclass(frozen=True)
class _Refresh:
    """The steps from a candidate to a written version."""

    target: Collection
    parent: VersionReader | None
    request: RefreshRequest

    def write(self) -> str | Publication:
        """Take the candidate through all steps up to a written version, and return the version's name.

        If there is nothing to write, return the final result instead.
        """
        target, parent, request, publish = self.target, self.parent, self.request, self.request.publish
        erased = target.erased()
        keys = request.candidate.keys
        allowed = ~erased.matches(keys)
        live = live_rows(request.candidate) & allowed
        candidate = replace(request.candidate, evidence=eligible_rows(request.candidate, request.norm_floor) & allowed)
        start = self._held_start()
        generation = Generation.of(target, parent, candidate, request.model, request.publish.align, start)
        previous = parent.items() if parent is not None and generation.continues else None
        removed = RemovedItems.of(parent, previous, candidate, request.retired, erased, publish.expire, request.today)
        alignment = Alignment.of(target, parent, candidate, publish, generation, start)
        aligned = replace(candidate, vectors=Rotated(candidate.vectors, alignment.rotation))
        verdict, metrics, probes = self._assess(previous, aligned, live, removed, generation)

        served = plan(
            previous, candidate.keys, candidate.evidence, allowed, removed.all, request.today,
            few=few_occurrences(candidate, publish.evidence),
        )  # fmt: skip
        if not len(served):
            return nothing_written(target.name, ["no item has a vector: check the training data", *verdict.reasons])
        hold_for = _create_views(target, publish.views, candidate, generation.number)
        models = request.models if generation.continues else None
        decision = hold_or_release(verdict, publish.gate, hold_for, held_in_a_row(target), models)
        if decision.released is not None and parent is not None:
            decision.released["same_coordinates"] = same_coordinates(target, generation)
            generation = generation.opened(target)
            decision.released["generation"] = generation.number
            _copy_views(target, parent, generation.number)
        diagnosis = diagnose(verdict.checks, request.lineage, request.remedies)
        rows = ServedRows(
            served, candidate.vectors, alignment.rotation, None if previous is None else previous.vectors, publish.ema
        )
        record = RefreshRecord(
            model=request.model,
            lineage=None if request.lineage is None else dict(request.lineage),
            new=served.num_new,
            uncertain=int(np.count_nonzero(served.statuses == UNCERTAIN)),
            retired=int(np.count_nonzero(removed.retired)),
            expired=int(np.count_nonzero(removed.expired & ~removed.retired)),
            erased=int(np.count_nonzero(~allowed)),
            gate_mode=publish.gate.mode,
            drift_from=drift_from(target, parent, generation),
            canaries=probes,
            metrics={name: value for name, value in metrics.items() if np.isfinite(value)},
            comparison=None if request.models is None else request.models.as_json(),
            max_held=publish.gate.max_held,
            sound=decision.sound,
            released=decision.released,
            not_released=decision.not_released,
            diagnosis=None if diagnosis is None else diagnosis.as_dict(),
            hold_for=decision.hold_for,
            remarks=verdict.reasons,
            training_step=request.training_step,
            quality=self._quality(),
            proposed_canary=None if target.settings(probe.SETTINGS) else request.proposed_canary,
        )
        return target.write(
            items_served(served, rows, previous, candidate),
            parent=None if parent is None else parent.version,
            job=request.job_id,
            anchor_generation=generation.number,
            anchor_version=generation.anchor_version,
            missing=served.num_missing,
            alignment=partial(self._alignment_record, alignment, generation, previous, rows),
            gate=[check.as_dict() for check in verdict.checks],
            extra=record.as_dict(),
            rotation=alignment.rotation,
            maps=self._backward_maps(generation, decision.released is not None),
            users=self._users(served, alignment.rotation, previous),
            users_feature=request.users_feature,
        )

    def _backward_maps(
        self, generation: Generation, same_coordinates: bool
    ) -> Callable[[ItemVectors], list[GenerationMap]] | None:
        """Return the function that fits the maps to earlier generations; None if the candidate opens no generation."""
        if self.parent is None or generation.anchor_version is not None:
            return None
        request = self.request
        return partial(
            backward_maps, self.target, self.parent, request.publish.keep_generations, same_coordinates, request.seed
        )

    def _quality(self) -> dict[str, Any] | None:
        """Return the metric of the candidate's model, with that of the parent's in ``before``; None if unknown."""
        if self.request.quality is None:
            return None
        parent, before = self.parent, None
        if parent is not None and (found := RefreshRecord.of(parent.manifest.extra).quality) is not None:
            before = {"version": parent.version} | {name: found[name] for name in QUALITY_BEFORE}
        return {**self.request.quality, "before": before}

    def _users(self, served: Plan, rotation: Array | None, previous: ItemVectors | None) -> UserVectors | None:
        """Return the users in the coordinates of the version, without erased users; None if only items are published.

        If the version's items are averaged, users are scored against the items before the average.
        """
        users = self.request.users
        if users is None:
            return None
        if self.request.publish.ema is not None and previous is not None:
            carried = self._scored_before()
            carried = previous.vectors if carried is None else carried
            users = replace(users, scored=ServedRows(served, self.request.candidate.vectors, rotation, carried, None))
        erased = self.target.erased(USERS).matches(users.keys)
        if erased.any():
            users = users.take(np.flatnonzero(~erased))
        if users.tower is not None:
            tower = users.tower
            for part in ERASED_FILES:
                tower = tower.without(part, self.target.erased(part).matches)
            users = replace(users, tower=tower if rotation is None else tower.rotated(rotation))
        return users if rotation is None else replace(users, vectors=Turned(users.vectors, rotation))

    def _scored_before(self) -> Vectors | None:
        """Return the item vectors that the parent's users are scored against; None if these are the served vectors.

        The result is also None if the vectors cannot be read, or if items were erased since the parent was opened.
        """
        if self.parent is None or self.parent.manifest.scored_file is None:
            return None
        try:
            parent = self.target.recommender(self.parent.version)
        except StoreUnavailable:
            raise
        except StoreError:
            return None
        return parent.users.scored if np.array_equal(parent.reader.keys, self.parent.keys) else None

    def _held_start(self) -> VersionReader | None:
        """Return a reader of the held version whose rows the run continued from; None if it can no longer be read."""
        if self.request.start_version is None or self.parent is None:
            return None
        try:
            start = self.target.open(self.request.start_version)
        except StoreUnavailable:
            raise
        except StoreError:
            return None
        same = (
            start.manifest.anchor_generation == self.parent.manifest.anchor_generation and start.dim == self.parent.dim
        )
        return start if same else None

    def _assess(
        self,
        previous: ItemVectors | None,
        aligned: ItemVectors,
        live: Array,
        removed: RemovedItems,
        generation: Generation,
    ) -> tuple[Verdict, Metrics, list[str] | None]:
        """Return the gate's verdict, the metrics, and the names of the probes used; None if nothing was measured."""
        target, parent, request = self.target, self.parent, self.request
        if request.publish.gate.mode == "off":
            return Verdict(), {}, None
        probes = {} if previous is None else probe.probes_of(target, same_coordinates(target, generation))
        if previous is not None and removed.all.any():
            previous = previous.take(np.flatnonzero(~removed.all))
        parent_version = None if parent is None else parent.version
        comparison = Comparison(
            previous, aligned, live, probes, Sampling(request.seed), request.publish.evidence.min_count,
            drift_anchor(target, parent, generation),
            {} if previous is None or parent is None else RefreshRecord.of(parent.manifest.extra).metrics,
            shorter_than_before(target, parent_version, request.lineage),
            (request.lineage or {}).get(ROW_FIGURES) or {},
            request.models,
        )  # fmt: skip
        metrics = measure(comparison)
        usual = {} if previous is None else usual_metrics(target, parent_version, request.model)
        own = {} if previous is None else dict(request.publish.gate.limits or {})
        verdict = Verdict((*generation.checks, *decide(metrics, Limits(own, usual), request.remedies).checks))
        return verdict, metrics, sorted(probes)

    def _alignment_record(
        self,
        alignment: Alignment,
        generation: Generation,
        previous: ItemVectors | None,
        rows: ServedRows,
        written: ItemVectors,
    ) -> dict[str, Any]:
        """Return the manifest's entry ``alignment``; call it once all ``rows`` are written, as ``written``."""
        ema = self.request.publish.ema
        return {
            "kind": alignment.kind,
            "onto": alignment.onto,
            "shared": generation.num_shared,
            "new_weight": None if ema is None or previous is None else ema.new_weight,
            "reset": int(np.count_nonzero(rows.reset)),
            "anchor_cosine_mean": anchor_cosine(self.target, previous, written, generation),
            "note": alignment.note,
        }


def _copy_views(target: Collection, parent: VersionReader, generation: int) -> None:
    """Define the views of the parent's generation, with equal frequencies, for a generation in the same coordinates."""
    for view in target.views(parent.version):
        if "map" in view:
            continue
        target.create_view(
            view["name"], **{name: view[name] for name in PARAMETERS if view[name] is not None},
            dim_in=view["dim_in"], anchor_generation=generation, materialized=view["materialized"],
        )  # fmt: skip


def _create_views(target: Collection, views: Sequence[View], candidate: ItemVectors, generation: int) -> list[str]:
    """Create the default and the requested views; return an error message for each view that cannot be created.

    The identity view is left out if a view of its name has other parameters, or is of another collection.
    """
    views_of_run: list[View] = list(views)
    default = default_view(target.name)
    if default not in {view.name for view in views_of_run} and not target.has_view(default, generation):
        views_of_run.insert(0, View(default))
    problems = []
    for view in views_of_run:
        try:
            target.create_view(
                view.name, **{name: getattr(view, name) for name in PARAMETERS},
                dim_in=candidate.dim, anchor_generation=generation, materialized=view.materialized, items=candidate,
            )  # fmt: skip
        except (ViewExists, ValueError) as error:  # an exponential view may have more anchors than there are items
            problems.append(str(error))
    raw = raw_view(target.name)
    if raw not in {view.name for view in views_of_run} and not target.has_view(raw, generation):
        with contextlib.suppress(ViewExists):
            target.create_view(raw, kind="identity", dim_in=candidate.dim, anchor_generation=generation)
    return problems
