"""Collections: their served and held versions, the gate's metrics over time, and the history of switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from embeddings.store import Collection
from service.features.store_access import in_store
from service.features.summaries import summary
from service.web.charts.limits import Measured, limit_chart
from service.web.content.held import held_now, why_held
from service.web.request import DashboardRequest

NUM_VERSIONS = 12
NUM_SWITCHES = 6
CHARTED_VERSIONS = 60
"""Number of newest versions in a chart of a gate metric."""


async def gather_one(request: DashboardRequest) -> dict[str, Any]:
    """Return the collection that the address names.

    Raises:
        UnknownCollection: No collection has that name.
    """
    return await in_store(lambda: describe(request.collection(), all_versions=request.asked("versions") == "all"))


def describe(collection: Collection, *, all_versions: bool = False) -> dict[str, Any]:
    """Return a collection for display, with its newest versions, or with all of them."""
    manifests = collection.versions()
    shown = summary(collection)
    newest = manifests[::-1] if all_versions else manifests[::-1][:NUM_VERSIONS]
    by_name = {manifest["version"]: manifest for manifest in manifests}
    readable = [manifest for manifest in manifests[::-1] if manifest["state"] != "expired" and not manifest["damaged"]]
    return {
        "collection": shown,
        "grown": grown(by_name, shown["current"]),
        "held": held_now(collection, shown["held"]),
        "versions": [_version(manifest, shown["current"]) for manifest in newest],
        "num_more": len(manifests) - len(newest),
        "usable": [manifest["version"] for manifest in readable],
        "recommending": [manifest["version"] for manifest in readable if manifest.get("users") is not None],
        "gate": gate_charts(manifests),
        "history": collection.history()[::-1][:NUM_SWITCHES],
    }


def grown(manifests: Mapping[str, Mapping[str, Any]], version: str | None) -> str:
    """Return in words by how many items a version differs from its parent; empty without a parent."""
    served = manifests.get(version or "", {})
    parent = manifests.get(served.get("parent") or "")
    if parent is None:
        return ""
    more = served["rows"] - parent["rows"]
    count = f"{abs(more):,} {'more' if more > 0 else 'fewer'}" if more else "as many"
    return f"{count} {'than' if more else 'as'} {parent['version']}"


def _version(manifest: dict[str, Any], current: str | None) -> dict[str, Any]:
    version = manifest["version"]
    return {
        **manifest,
        "why": why_held(manifest) if manifest["state"] == "held" else None,
        **{name: manifest.get(name) for name in ("comparison", "quality")},
        "is_current": version == current,
        "can_promote": version != current
        and manifest["state"] not in ("expired", "candidate")
        and not manifest["damaged"],
        # Version names sort by age, so a smaller one is older than the served version.
        "is_rollback": current is not None and version < current,
    }


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return the collections of the key's tenant."""
    return {"collections": await in_store(listed, request)}


def listed(request: DashboardRequest) -> list[dict[str, Any]]:
    """Return the summary of each collection of the key's tenant, with its newest held version, if any."""
    shown = []
    for name in request.store.collections():
        collection = request.store.collection(name)
        fields = summary(collection)
        shown.append({**fields, "held_now": held_now(collection, fields["held"])})
    return shown


def gate_charts(manifests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chart for each metric that the gate judged; metrics that failed in their latest version come first.

    ``manifests``: the versions, oldest first.
    """
    by_metric: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for manifest in manifests[-CHARTED_VERSIONS:]:
        for check in manifest["gate"]:
            by_metric.setdefault(check["metric"], []).append((manifest, check))
    charts = [_chart(metric, judged) for metric, judged in by_metric.items()]
    return sorted(charts, key=lambda chart: (not chart["failed"], chart["never_moved"]))


def _chart(metric: str, judged: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    measured = [
        Measured(manifest["version"], check["value"], check["threshold"], check["verdict"] == "fail")
        for manifest, check in judged
    ]
    manifest, last = judged[-1]
    at_most = last.get("bound") == "at_most"
    title = (
        f"{metric} of {len(measured)} versions: last {_text(last['value'])}, "
        f"required {'at most' if at_most else 'at least'} {_text(last['threshold'])}"
    )
    return {
        "metric": metric,
        "svg": limit_chart(measured, title, at_most),
        "at_most": at_most,
        "value": last["value"],
        "limit": last["threshold"],
        "version": manifest["version"],
        "failed": last["verdict"] == "fail",
        "never_moved": len({point.value for point in measured}) == 1 and not any(point.failed for point in measured),
    }


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
