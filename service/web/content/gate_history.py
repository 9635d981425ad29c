"""The gate's figures from version to version, each with its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.web.charts.limits import Measured, limit_chart

NUM_VERSIONS = 60
"""The newest so many are drawn."""


def gate_charts(manifests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chart for each metric that the gate judged, those that failed last first.

    Args:
        manifests: Of the versions, oldest first.
    """
    by_metric: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for manifest in manifests[-NUM_VERSIONS:]:
        for check in manifest["gate"]:
            by_metric.setdefault(check["metric"], []).append((manifest, check))
    charts = [_chart(metric, judged) for metric, judged in by_metric.items()]
    return sorted(charts, key=lambda one: (not one["failed"], one["never_moved"]))


def _chart(metric: str, judged: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    measured = [
        Measured(manifest["version"], check["value"], check["threshold"], check["verdict"] == "fail")
        for manifest, check in judged
    ]
    manifest, last = judged[-1]
    at_most = _is_at_most(last)
    title = (
        f"{metric} of {len(measured)} versions: last {_text(last['value'])}, "
        f"{'at most' if at_most else 'at least'} {_text(last['threshold'])} is asked for"
    )
    return {
        "metric": metric,
        "svg": limit_chart(measured, title, at_most),
        "at_most": at_most,
        "value": last["value"],
        "limit": last["threshold"],
        "version": manifest["version"],
        "failed": last["verdict"] == "fail",
        "never_moved": len({one.value for one in measured}) == 1 and not any(one.failed for one in measured),
    }


def _is_at_most(check: Mapping[str, Any]) -> bool:
    """Return True if the limit is the largest value that passes; of an older manifest by its verdict."""
    if "bound" in check:
        return bool(check["bound"] == "at_most")
    if check["value"] is None:
        return False
    return bool((check["value"] <= check["threshold"]) == (check["verdict"] == "pass"))


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
