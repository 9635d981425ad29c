"""Collections as lists and the dashboard show them."""

from __future__ import annotations

from typing import Any

from embeddings.store import Collection, default_view


def summary(collection: Collection) -> dict[str, Any]:
    """Return a collection as lists show it; ``current`` is null before its first publication."""
    current = collection.current()
    manifests = collection.versions()
    manifest = next((one for one in manifests if one["version"] == current), None)
    fields = ("rows", "carried", "missing", "dim", "id_type", "anchor_generation", "job", "published_at")
    return {
        "name": collection.name,
        "current": current,
        "default_view": default_view(collection.name),
        **{field: None if manifest is None else manifest[field] for field in fields},
        "num_versions": len(manifests),
        "latest": {field: manifests[-1][field] for field in ("version", "state", "reasons", "created_at")},
        "views": [view["name"] for view in collection.views()],
    }
