"""Summaries of collections for lists and the dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embeddings.refresh import probe
from embeddings.refresh.held_versions import held_in_a_row
from embeddings.refresh.settings import MAX_HELD
from embeddings.sinks.follow import sinks_of
from embeddings.store import Collection, default_view


def summary(collection: Collection) -> dict[str, Any]:
    """Return the summary of a collection; its ``current`` is None before the first publication.

    The field ``held`` describes the versions held since the current version last changed: their number, the time of the
    first, and their names. Once ``max_held`` versions are held, an alert is raised. ``diagnosis`` is the diagnosis of
    the newest. ``quality`` is the held-out metric of the current version's model, and that of the previous version.
    ``proposed_canary`` is a sentence that proposes a canary, None if a canary exists or there is nothing to propose.
    ``sinks`` are the databases that get each version, with the seconds by which they are behind.
    """
    current = collection.current()
    manifests = collection.versions()
    manifest = next((candidate for candidate in manifests if candidate["version"] == current), None)
    fields = ("rows", "carried", "missing", "dim", "id_type", "anchor_generation", "job", "published_at")
    return {
        "name": collection.name,
        "current": current,
        "default_view": default_view(collection.name),
        **{field: None if manifest is None else manifest[field] for field in fields},
        **{name: None if manifest is None else manifest.get(name) for name in ("quality", "proposed_canary")},
        **({"proposed_canary": None} if collection.settings(probe.SETTINGS) else {}),
        "num_versions": len(manifests),
        "latest": {field: manifests[-1][field] for field in ("version", "state", "reasons", "created_at")},
        "held": _held(collection, manifests),
        "sinks": sinks_of(collection),
        "views": [view["name"] for view in collection.views()],
    }


def _held(collection: Collection, manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    held = held_in_a_row(collection, manifests)
    return {
        "in_a_row": len(held),
        "since": held[0]["created_at"] if held else None,
        "versions": [manifest["version"] for manifest in held],
        "max_held": held[-1].get("max_held", MAX_HELD) if held else None,
        "diagnosis": held[-1].get("diagnosis") if held else None,
    }
