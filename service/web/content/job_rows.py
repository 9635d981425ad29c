"""Rows of lists of jobs: progress, latest metrics, and the outcome of the publication."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from service.web.content.held import why_held
from trainer.runs import starvation
from trainer.spec.evaluation import figures_named
from trainer.spec.stored_specs import StoredJob


def job_row(job: dict[str, Any], now: datetime.datetime) -> dict[str, Any]:
    """Return a job's row in a list: its fields, with percent done, duration, last metrics and reasons for a hold."""
    progress, publication = job["progress"] or {}, job["publication"] or {}
    return {
        **job,
        "percent": percent_prepared(job["preparation"]) if job["preparation"] else percent_done(job["state"], progress),
        "epoch": f"{progress['epoch']}/{progress['epochs']}" if progress.get("epochs") else "",
        "rate": progress.get("examples_per_second"),
        "starved": starvation.in_words(progress.get("starved")) if job["state"] == "running" else None,
        "seconds": seconds_of(job, now),
        "auc": last_auc(job["metrics"]),
        "rmse": last_value(job["metrics"], "rmse"),
        "published": publication.get("status") if publication.get("status") != "none" else None,
        "version": publication.get("version"),
        "collection": publication.get("collection"),
        "why": why_held(publication) if publication.get("status") == "held" else None,
        "held_in_a_row": publication.get("held_in_a_row") or 0,
        "released": publication.get("released"),
        "optimizer": StoredJob(job["spec"]).optimizer_kind,
    }


def seconds_of(job: Mapping[str, Any], now: datetime.datetime) -> float | None:
    """Return the time that a job took, or has taken so far; None if it has not started."""
    begun: datetime.datetime | None = job["started_at"]
    return None if begun is None else ((job["finished_at"] or now) - begun).total_seconds()


def percent_prepared(preparation: Mapping[str, Any]) -> int | None:
    """Return the share of a stage's rows that are done, in percent; None if the total is unknown."""
    total = preparation["total_rows"]
    return min(99, int(100 * preparation["rows"] / total)) if total else None


def percent_done(state: str, progress: Mapping[str, Any]) -> int | None:
    """Return the share of the epochs done, in percent; within an epoch only if the run reports its number of steps."""
    if state in ("succeeded", "publishing"):
        return 100
    epochs = progress.get("epochs")
    if not epochs:
        return None
    if progress.get("steps"):
        return min(99, int(100 * (progress.get("step") or 0) / progress["steps"]))
    return min(99, int(100 * max((progress.get("epoch") or 0) - 1, 0) / epochs))


def measured(metrics: list[dict[str, Any]], split: str, name: str) -> list[dict[str, Any]]:
    """Return the entries of ``metrics`` that are of the split and have a value of this name, one per epoch."""
    return [row for row in metrics if row["split"] == split and row.get(name) is not None]


def curve(metrics: list[dict[str, Any]], split: str, name: str) -> list[tuple[int, float]]:
    """Return (epoch, value) of a metric on a split."""
    return [(row["epoch"], row[name]) for row in measured(metrics, split, name)]


def last_auc(metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the latest epoch's AUC on the first of the splits test, validation, train that has an AUC."""
    return last_value(metrics, "auc")


def last_value(metrics: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the latest epoch's value of a metric, on the split chosen as in :func:`last_auc`.

    If the job has several labels, the value is of the first label that has the metric.
    """
    name = of_first_label(metrics, name)
    for split in ("test", "validation", "train"):
        if rows := measured(metrics, split, name):
            return {"split": split, "value": rows[-1][name], "epoch": rows[-1]["epoch"]}
    return None


def of_first_label(metrics: list[dict[str, Any]], name: str) -> str:
    """Return the metric's name in ``metrics``: ``name``, or with several labels the first label's name for it."""
    return next(iter(figures_named(name, (figure for row in metrics for figure in row))), name)
