"""The entries of a version's manifest that a refresh writes, with their reader and writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from embeddings.refresh.settings import MAX_HELD


@dataclass(frozen=True, kw_only=True)
class RefreshRecord:
    """Manifest entries of a refresh; the defaults stand for entries that older versions or other writers left out.

    Attributes:
        model: the settings besides dim that determine the geometry; None if unknown.
        new: number of items that the parent did not have.
        uncertain: number of items that are served as uncertain.
        retired, expired: numbers of the parent's items that training gave up, or that were carried for too long.
        erased: number of the candidate's items that were erased.
        canaries: names of the probes that took part, None if nothing was measured.
        metrics: every finite metric, with or without a limit.
        sound, released, not_released, hold_for: as in :class:`embeddings.refresh.hold_policy.HoldDecision`.
        diagnosis: the failed checks, by how much they failed, and the cause.
        remarks: failed checks, also of a version that is published.
        training_step, proposed_canary: as in :class:`embeddings.refresh.publish.RefreshRequest`.
        quality: the same, with that of the parent in ``before``.
    """

    model: str | None = None
    lineage: Mapping[str, Any] | None = None
    new: int = 0
    uncertain: int = 0
    retired: int = 0
    expired: int = 0
    erased: int = 0
    gate_mode: str | None = None
    drift_from: str | None = None
    canaries: Sequence[str] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    comparison: Mapping[str, Any] | None = None
    max_held: int = MAX_HELD
    sound: bool = False
    released: dict[str, Any] | None = None
    not_released: str | None = None
    diagnosis: dict[str, Any] | None = None
    hold_for: Sequence[str] = ()
    remarks: Sequence[str] = ()
    training_step: int | None = None
    quality: Mapping[str, Any] | None = None
    proposed_canary: str | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> RefreshRecord:
        """Read the entries of a manifest; other entries are ignored."""
        return cls(**{name: manifest[name] for name in _NAMES if manifest.get(name) is not None})

    def as_dict(self) -> dict[str, Any]:
        """Return the entries for the manifest."""
        entries = {name: getattr(self, name) for name in _NAMES}
        return {name: entry for name, entry in entries.items() if entry is not None or name not in _LEFT_OUT}


_NAMES = tuple(one.name for one in fields(RefreshRecord))
_LEFT_OUT = frozenset({"canaries", "training_step", "quality", "proposed_canary"})
"""Entries that are left out if None; the others are written as null."""
