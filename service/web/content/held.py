"""Reasons for holding a version: one sentence, and a table of the failed checks with their values and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embeddings.store import Collection

MAX_NAMED = 3
"""Most failed checks named in the summary; the table lists all."""


def why_held(document: Mapping[str, Any]) -> dict[str, Any]:
    """Explain why a version is held, from its manifest or its job's publication.

    Returns:
        ``summary`` (a sentence), ``failed`` (rows with metric, value, limit, bound, times, about), ``advice``, ``rows``
        (changes in the rows of data; None if unknown), ``others`` (other reasons), ``may_promote`` (False if its run is
        at fault). For a version without a diagnosis they are made from its gate's checks or its reasons.
    """
    diagnosis = document.get("diagnosis")
    if diagnosis:
        failed = list(diagnosis.get("failed") or ())
        summary = _without_figures(diagnosis["summary"], failed)
        may_promote = diagnosis.get("cause") != "run"
        shown = {**diagnosis, "failed": failed, "summary": summary, "may_promote": may_promote}
        return {"advice": "", "rows": None, "others": [], **shown}
    failed = [
        {
            "metric": check["metric"], "value": check["value"], "limit": check["threshold"],
            "bound": check.get("bound"), "times": None, "about": check.get("remedy") or "",
        }
        for check in document.get("gate") or () if check["verdict"] == "fail"
    ]  # fmt: skip
    reasons = list(document.get("reasons") or ())
    if failed:
        named = ", ".join(check["metric"] for check in failed[:MAX_NAMED])
        more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        summary = f"{len(failed)} of {len(document['gate'])} checks of the gate failed: {named}{more}."
    else:
        summary = reasons[0] if reasons else "No reason was given."
    other_reasons = [] if failed else reasons[1:]
    shown = {"summary": summary, "failed": failed, "others": other_reasons, "advice": "", "rows": None}
    return {**shown, "may_promote": True}


def _without_figures(summary: str, failed: list[dict[str, Any]]) -> str:
    """Return a diagnosis's sentence without the failed checks at its end, which the table shows."""
    if not failed:
        return summary
    cause, _, figures = summary.partition(f": {failed[0]['metric']} ")
    return f"{cause}." if figures else summary


def held_now(collection: Collection, held: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest version held since the current version last changed, and the reasons; None if none is held.

    ``held``: number, names and limit of these versions, as service.features.summaries gives them in ``held``.
    """
    if not held["in_a_row"]:
        return None
    manifest = collection.manifest(held["versions"][-1])
    fields = ("version", "created_at", "job", "not_released", "comparison", "quality")
    return {**{name: manifest.get(name) for name in fields}, **held, "why": why_held(manifest)}
