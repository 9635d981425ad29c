"""One collection: its versions, what is held and why, the gate's figures over time, and who switched it."""

from __future__ import annotations

from typing import Any

from embeddings.store import Collection
from service.features.store_access import in_store
from service.features.summaries import summary
from service.web.content.gate_history import gate_charts
from service.web.content.held import held_now, why_held
from service.web.visit import Visit

NUM_VERSIONS = 12
NUM_SWITCHES = 6


async def gather(visit: Visit) -> dict[str, Any]:
    """Return the collection that the address names.

    Raises:
        UnknownCollection: There is none of that name.
    """
    return await in_store(lambda: describe(visit.collection(), all_versions=visit.asked("versions") == "all"))


def describe(collection: Collection, *, all_versions: bool = False) -> dict[str, Any]:
    """Return a collection for display, with its newest versions, or with all of them."""
    manifests = collection.versions()
    shown = summary(collection)
    newest = manifests[::-1] if all_versions else manifests[::-1][:NUM_VERSIONS]
    usable = [one["version"] for one in manifests[::-1] if one["state"] != "expired" and not one["damaged"]]
    return {
        "collection": shown,
        "held": held_now(collection, shown["held"]),
        "versions": [_version(one, shown["current"]) for one in newest],
        "num_more": len(manifests) - len(newest),
        "usable": usable,
        "gate": gate_charts(manifests),
        "history": collection.history()[::-1][:NUM_SWITCHES],
    }


def _version(manifest: dict[str, Any], current: str | None) -> dict[str, Any]:
    version = manifest["version"]
    return {
        **manifest,
        "why": why_held(manifest) if manifest["state"] == "held" else None,
        "comparison": manifest.get("comparison"),
        "is_current": version == current,
        "can_promote": version != current
        and manifest["state"] not in ("expired", "candidate")
        and not manifest["damaged"],
        # Versions are numbered, so an earlier one is behind what is served.
        "is_rollback": current is not None and version < current,
    }
