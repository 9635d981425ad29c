"""Rows of lists of jobs: progress, latest metrics, and the outcome of the publication."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from service.web.content.held import why_held
from trainer.runs import starvation
from trainer.spec.evaluation import figures_named, has_chart, title_of
from trainer.spec.stored_specs import StoredJob, best_epoch

HELD_OUT = ("test", "validation")


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
        "figure": main_figure(job),
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


def best_figures(job: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return a metric of a job in its best epoch by validation, or without one in the last: per split, and the epoch.

    ``label``: the first label that has the metric, if the job has several and ``metric`` names none; else "".
    """
    name = of_first_label(job["metrics"], metric)
    epochs = [row["epoch"] for split in HELD_OUT for row in measured(job["metrics"], split, name)]
    best = best_epoch(job)
    epoch = best if best in epochs else max(epochs, default=None)
    values = {
        split: next((value for at, value in curve(job["metrics"], split, name) if at == epoch), None)
        for split in HELD_OUT
    }
    return {**values, "epoch": epoch, "is_best": epoch == best, "label": name.removeprefix(metric).lstrip("/")}


def main_figure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``value``, ``split`` and ``title`` of a job's first metric with a chart; None without one.

    It is of the epoch of :func:`best_figures`, on the test rows if they were measured.
    """
    held_out = [row for row in job["metrics"] if row["split"] in HELD_OUT]
    name = next((name for row in held_out for name in row if row[name] is not None and has_chart(name)), None)
    best = {} if name is None else best_figures(job, name)
    split = next((split for split in HELD_OUT if best.get(split) is not None), None)
    return None if name is None or split is None else {"value": best[split], "split": split, "title": title_of(name)}


def of_first_label(metrics: list[dict[str, Any]], name: str) -> str:
    """Return the metric's name in ``metrics``: ``name``, or with several labels the first label's name for it."""
    return next(iter(figures_named(name, (figure for row in metrics for figure in row))), name)
