"""Jobs as rows of a table: how far they are, their AUC, what they published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.cli import output, publication_status


def row(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job as a table shows them."""
    auc = last_auc(job, "test") or last_auc(job, "validation")
    published = publication_status.status(job.get("publication") or {})
    return {**job, "progress": progress(job), "auc": auc, "publication": published}


def progress(job: Mapping[str, Any]) -> str:
    """Return a job's progress: rows prepared, or its epoch; empty before both."""
    if job.get("preparation"):
        return output.preparation(job["preparation"])
    told = job.get("progress") or {}
    return f"epoch {told['epoch']}/{told['epochs']}" if told.get("epochs") else ""


def last_auc(job: Mapping[str, Any], split: str) -> str:
    """Return the newest AUC on a split, empty where there is none."""
    from trainer.spec.evaluation import figures_named

    metrics = [metric for metric in job.get("metrics") or [] if metric.get("split") == split]
    name = next(iter(figures_named("auc", (figure for metric in metrics for figure in metric))), "auc")
    values = [metric[name] for metric in metrics if metric.get(name) is not None]
    return f"{values[-1]:.4f}" if values else ""
