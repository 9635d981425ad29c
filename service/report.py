"""The report of a job: its metrics per epoch, whether more epochs helped, and what became of its vectors."""

from __future__ import annotations

import datetime
import json
from typing import Any

from service import rendering
from service.charts import Series, line_chart

CHARTED = {"auc": "AUC", "ndcg_10": "NDCG@10", "hit_rate_10": "hit rate@10"}
"""Metrics that get a chart where a job has them, in words."""
OVERFIT_AUC = 0.002
"""A validation AUC that falls by more than this from its best epoch to its last is worth a word."""


def report(job: dict[str, Any]) -> dict[str, Any]:
    """From a job as shown: ``epochs`` (one row per epoch and split), ``best``, ``last`` and a ``finding``."""
    validation = [one for one in job["metrics"] if one["split"] == "validation" and one.get("auc") is not None]
    best = max(validation, key=lambda one: one["auc"], default=None)
    last = validation[-1] if validation else None
    finding = "no validation AUC yet"
    if best is not None and last is not None:
        loss = best["auc"] - last["auc"]
        if loss > OVERFIT_AUC:
            finding = (
                f"validation AUC fell by {loss:.4f} from epoch {best['epoch']} to epoch {last['epoch']}: it overfits"
            )
        else:
            finding = f"validation AUC {last['auc']:.4f}, at best {best['auc']:.4f}: no overfitting seen"
    kept = (
        "id", "name", "state", "dataset", "created_at", "started_at", "finished_at", "attempt", "publication", "error",
    )  # fmt: skip
    fields = {name: job[name] for name in kept}
    return {**fields, "finding": finding, "best": best, "last": last, "metrics": job["metrics"], "spec": job["spec"]}


def _chart(found: dict[str, Any], name: str, word: str) -> dict[str, Any] | None:
    """The curves of one metric over epochs, None where there is no value."""
    curves = [
        Series(
            split,
            [(m["epoch"], m[name]) for m in found["metrics"] if m["split"] == split and m.get(name) is not None],
        )
        for split in ("validation", "test")
    ]
    curves = [one for one in curves if one.points]
    if not curves:
        return None
    return {"word": word, "curves": curves, "svg": line_chart(curves, f"{word} per epoch of {found['name']}", word)}


def as_html(found: dict[str, Any]) -> str:
    """The report as a page in the dashboard's style."""
    charts = [_chart(found, name, word) for name, word in CHARTED.items()]
    columns = list(dict.fromkeys(("epoch", "split", *(name for one in found["metrics"] for name in one))))
    begun, ended = (
        found[name] and datetime.datetime.fromisoformat(found[name]) for name in ("started_at", "finished_at")
    )
    return rendering.page(
        "report.html",
        job=found,
        columns=columns,
        cells=[[_cell(one.get(name)) for name in columns] for one in found["metrics"]],
        charts=[one for one in charts if one is not None],
        seconds=(ended - begun).total_seconds() if begun and ended else None,
        spec=json.dumps(found["spec"], indent=2),
    )


def _cell(value: Any) -> str:
    return f"{value:.5f}" if isinstance(value, float) else "" if value is None else str(value)
