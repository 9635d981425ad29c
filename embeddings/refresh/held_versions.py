"""Versions held since the served version last changed, and the choice of one of them for a refresh to continue from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embeddings.refresh.record import RefreshRecord
from embeddings.store import Collection

Manifest = dict[str, Any]


def held_in_a_row(collection: Collection, manifests: Sequence[Manifest] | None = None) -> list[Manifest]:
    """Return the manifests of the versions held since the last switch, oldest first.

    A publication, a promotion or a rollback ends the series; a candidate that was never judged does not count.
    ``manifests`` are the manifests of all versions, if the caller has them already.
    """
    history, current = collection.history(), collection.current()
    since = history[-1]["at"] if history else ""
    if manifests is None:
        # Convert no records of held versions from before the last switch: there may be many.
        records = [one for one in collection.records() if one.state in ("held", "published")]
        manifests = [one.to_json() for one in records if one.manifest.created_at >= since or one.state == "published"]
    index = next((number for number, one in enumerate(manifests) if one["version"] == current), -1)
    return [one for one in manifests[index + 1 :] if one["state"] == "held" and one["created_at"] >= since]


def sound_version(collection: Collection) -> Manifest | None:
    """Return the manifest of the newest held version from whose rows the next refresh may continue; None without any.

    Such a version has no fault of run, rows or model (:class:`embeddings.refresh.hold_policy.HoldDecision`), and it was
    aligned onto the served version.
    """
    current = collection.current()
    sound = [one for one in held_in_a_row(collection) if RefreshRecord.of(one).sound and one["parent"] == current]
    return sound[-1] if current is not None and sound else None
