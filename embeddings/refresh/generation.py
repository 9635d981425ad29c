"""Anchor generation of a candidate, which is a system of coordinates, and the rotation into it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embeddings.refresh.gate import Check
from embeddings.refresh.gate_checks.anchor_drift import DRIFT
from embeddings.refresh.gate_checks.cosines import cosines_of
from embeddings.refresh.procrustes import TooFewShared, min_shared, procrustes
from embeddings.refresh.record import RefreshRecord
from embeddings.refresh.settings import Settings
from embeddings.store import Collection, CorruptStore, StoreError, UnknownVersion, VersionReader
from embeddings.vectors.item_vectors import Array, ItemVectors, shared_rows


@dataclass(frozen=True)
class Generation:
    """Anchor generation of a candidate: the parent's coordinates, or new coordinates.

    Attributes:
        continues: True for the parent's generation.
        anchor_version: the generation's first version; None in a new generation.
        num_shared: number of items found in both the parent and the candidate.
        checks: the checks that decided, which are the first checks of the gate.
    """

    number: int
    continues: bool
    anchor_version: str | None
    num_shared: int
    checks: tuple[Check, ...]

    @classmethod
    def of(
        cls,
        target: Collection,
        parent: VersionReader | None,
        candidate: ItemVectors,
        model: str,
        aligns: bool = True,
        start: VersionReader | None = None,
    ) -> Generation:
        """Return the generation of a candidate of model family ``model``; ``parent`` is the served version.

        ``aligns`` is True if the candidate must be rotated onto ``start`` or the parent. ``start`` is the held version,
        in the parent's coordinates, whose rows the run continued from.
        """
        if parent is None:
            return cls(1 + _last_generation(target), False, None, 0, ())
        remedy = (
            "this begins a new anchor generation, which today's consumers can read only by names such as "
            f"'{target.name}@g{parent.manifest.anchor_generation}': if that is intended, promote it with a reason and "
            "override_gate, and retrain the consumers"
        )
        few = "no item with a vector in both versions"
        if aligns:
            few = "too few shared items to align on (a warm start with publish.align: false needs none)"
        manifest = parent.manifest
        num_shared = max(len(shared_found(version, candidate)[0]) for version in (parent, start) if version is not None)
        old_model = RefreshRecord.of(manifest.extra).model
        checks = tuple(
            Check(metric, float(value), float(limit), at_most=False, remedy=f"{change}: {remedy}")
            for metric, value, limit, change in (
                ("same_dim", candidate.dim == parent.dim, 1, f"dim was {parent.dim}, is {candidate.dim}"),
                ("same_model", old_model in (None, model), 1, f"model was '{old_model}', is '{model}'"),
                ("shared", num_shared, min_shared(parent.dim) if aligns else 1, few),
            )
        )
        if all(check.verdict == "pass" for check in checks):
            return cls(manifest.anchor_generation, True, manifest.anchor_version, num_shared, checks)
        return cls(1 + _last_generation(target), False, None, num_shared, checks)

    def opened(self, target: Collection) -> Generation:
        """Return a new generation in the same coordinates, whose first version is this candidate."""
        return replace(self, number=1 + _last_generation(target), anchor_version=None)


def _last_generation(target: Collection) -> int:
    """Return the highest generation; held versions use up numbers too, because views may be defined for them."""
    return max((record.manifest.anchor_generation for record in target.records()), default=0)


@dataclass(frozen=True)
class Alignment:
    """Alignment of a candidate into the coordinates of its generation.

    Attributes:
        onto: the version it was aligned onto, None in a new generation.
        rotation: R [d, d], None if the candidate was not rotated.
    """

    onto: str | None = None
    rotation: Array | None = None
    note: str | None = None

    @classmethod
    def of(
        cls,
        target: Collection,
        parent: VersionReader | None,
        candidate: ItemVectors,
        publish: Settings,
        generation: Generation,
        start: VersionReader | None = None,
    ) -> Alignment:
        """Align ``candidate`` onto ``parent``, or without ``publish.ema`` onto the anchor generation's first version.

        Without an average, a chain of versions, each aligned onto the previous version, would drift. A run that
        continued from a held version (``start``) is aligned onto that version, which is in the parent's coordinates and
        shares more items with it.
        """
        if parent is None or not generation.continues:
            return cls()
        if not publish.align:
            return cls(parent.version, None, "align: false")
        note = None
        if publish.ema is None and generation.anchor_version not in (None, parent.version):
            try:
                anchor = target.open(str(generation.anchor_version))
                return cls(anchor.version, _rotation_onto(anchor, candidate))
            except (TooFewShared, UnknownVersion) as error:
                note = f"aligned onto the parent instead of the anchor {generation.anchor_version}: {error}"
        onto = parent if start is None else start
        return cls(onto.version, _rotation_onto(onto, candidate), note)

    @property
    def kind(self) -> str:
        """``none``, ``identity`` or ``procrustes``, as manifests have it."""
        if self.onto is None:
            return "none"
        return "identity" if self.rotation is None else "procrustes"


def _rotation_onto(served: VersionReader, candidate: ItemVectors) -> Array:
    old, new = shared_found(served, candidate)
    return procrustes(candidate.vectors, served.items().vectors, source_rows=new, target_rows=old)


def shared_found(served: VersionReader, candidate: ItemVectors) -> tuple[Array, Array]:
    """Return rows (in served, in candidate) of the items found in both."""
    old, new = shared_rows(served.keys, candidate.keys)
    both = served.items().renewed[old] & candidate.evidence[new]
    return old[both], new[both]


def anchor_cosine(
    target: Collection, previous: ItemVectors | None, written: ItemVectors, generation: Generation
) -> float | None:
    """Return the mean cosine of the vectors to be served to those of the anchor generation's first version.

    The mean is over the items found in both.
    """
    if previous is None or generation.anchor_version is None:
        return None
    try:
        anchor = target.open(generation.anchor_version)
    except (CorruptStore, UnknownVersion):
        # The figure is only shown: a failure to compute it must not block the publication.
        return None
    old, new = shared_found(anchor, written)
    if not len(old):
        return None
    return float(cosines_of(anchor.items().vectors, written.vectors, old, new).mean())


def same_coordinates(target: Collection, generation: Generation) -> list[int]:
    """Return the numbers of the generations that share a candidate's coordinates, its own last."""
    if not generation.continues or generation.anchor_version is None:
        return [generation.number]
    try:
        released = RefreshRecord.of(target.manifest(generation.anchor_version)).released or {}
    except StoreError:
        return [generation.number]
    return [*released.get("same_coordinates", ()), generation.number]


def drift_from(target: Collection, parent: VersionReader | None, generation: Generation) -> str | None:
    """Return the name of the version that drift is counted from, None in a new generation.

    Drift is counted from the generation's first version, or from the latest version promoted although the gate's check
    of drift had failed: consumers have been fitted on its vectors.
    """
    if parent is None or generation.anchor_version is None:
        return None
    manifest = target.manifest(parent.version)
    drifted = any(check["metric"] == DRIFT and check["verdict"] == "fail" for check in manifest["gate"])
    record = RefreshRecord.of(manifest)
    if drifted and (manifest["override"] or record.released):
        return parent.version
    return record.drift_from or generation.anchor_version


def drift_anchor(target: Collection, parent: VersionReader | None, generation: Generation) -> ItemVectors | None:
    """Return the items of the version that drift is counted from; None if there is none, or it cannot be read."""
    version = drift_from(target, parent, generation)
    if version is None:
        return None
    try:
        return target.open(version).items()
    except (CorruptStore, UnknownVersion):
        return None
