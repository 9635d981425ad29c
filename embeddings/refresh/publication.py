"""The result of a publish step: a version is published or held, and repeating the step gives the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from embeddings.refresh.diagnosis import stale
from embeddings.refresh.gate_checks.base import Metrics
from embeddings.refresh.held_versions import held_in_a_row
from embeddings.refresh.record import RefreshRecord
from embeddings.refresh.settings import MAX_HELD
from embeddings.store import Collection, StaleParent, Store

KEEP_LAST = 30


@dataclass(frozen=True)
class Publication:
    """The result of a publish step.

    Attributes:
        version: the version written, None if there was nothing to write.
        reasons: reasons for holding it, each with a remedy; under gate mode ``report`` also the failed checks.
        gate: checks as {metric, value, threshold, bound, verdict, remedy}.
        anchor_cosine: mean cosine to the anchor generation's first version; None if it is the first itself.
        diagnosis: failed checks and their cause (embeddings.refresh.diagnosis), None if none failed.
        held_in_a_row: number of versions held since the last switch, this one included; 0 if it is published.
        held_since: time at which the first of these was held.
        max_held: number of versions held in a row that raises an alert.
        released: the series of held versions that this publication ends (embeddings.refresh.hold_policy), or None.
        quality: held-out metric of the model, with that of the version before; None if unknown.
        proposed_canary: text that proposes a probe; None for a held version, and if the collection has a probe.
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
    maps: Sequence[Mapping[str, Any]] = ()
    quality: Mapping[str, Any] | None = None
    proposed_canary: str | None = None


def conclude(target: Collection, version: str, keep_last: int | None, fence: Callable[[], None] | None) -> Publication:
    """Publish or hold a written version, as its manifest says; if that is done already, return the same result."""
    manifest, overtaken = target.manifest(version), None
    if manifest["state"] == "candidate":
        reasons = list(RefreshRecord.of(manifest).hold_for)
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
    record = RefreshRecord.of(manifest)
    # An expired version keeps the reasons for which it was held.
    was_held = manifest["state"] == "expired" and manifest["reasons"] and manifest["override"] is None
    held = manifest["state"] == "held" or was_held
    row = held_in_a_row(target) if held else []
    diagnosis = overtaken or record.diagnosis
    if held and diagnosis is None and not any(check["verdict"] == "fail" for check in manifest["gate"]):
        diagnosis = stale(manifest["reasons"][0]).as_dict()
    return Publication(
        "held" if held else "published",
        target.name,
        version,
        manifest["reasons"] if held else list(record.remarks),
        manifest["gate"],
        record.metrics,
        manifest["anchor_generation"],
        manifest["alignment"]["anchor_cosine_mean"],
        diagnosis,
        len(row),
        row[0]["created_at"] if row else None,
        record.max_held,
        None if held else record.released,
        manifest.get("maps", ()),
        record.quality,
        None if held else record.proposed_canary,
    )


def last_step(store: Store, collection: str, job_id: str, fence: Callable[[], None] | None = None) -> int:
    """Return the last training step of which a job that publishes several times has published or held vectors.

    Versions that the job wrote but neither published nor held are finished first. Return -1 if it has no version.
    ``fence`` is called before a switch; if it raises, the version stays a candidate.
    """
    target = store.collection(collection)
    last = -1
    for version in target.records():
        step = RefreshRecord.of(version.manifest.extra).training_step
        if version.manifest.job == job_id and step is not None:
            if version.state == "candidate":
                conclude(target, version.manifest.version, KEEP_LAST, fence)
            last = max(last, step)
    return last


def earlier_end(
    target: Collection, job_id: str | None, parent_version: str | None, gate_mode: str, training_step: int | None
) -> str | None:
    """Return the version that an earlier attempt of this job wrote for the same parent or training step, if any.

    A version that the gate held does not count if the job's gate mode has changed since then.
    """
    if job_id is None:
        return None
    for version in reversed(target.records()):
        manifest, record = version.manifest, RefreshRecord.of(version.manifest.extra)
        if manifest.job != job_id or record.training_step != training_step:
            continue
        if training_step is None and manifest.parent != parent_version:
            continue
        if version.state != "held" or record.gate_mode == gate_mode:
            return manifest.version
    return None


def nothing_written(collection: str, reasons: list[str]) -> Publication:
    return Publication("held", collection, None, reasons, [], {}, 0)
