"""The report of a job: its metrics per epoch, a finding about overfitting, and the outcome of its publication."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from typing import Any

from service.web import rendering
from service.web.charts.lines import Series, calibration_chart, line_chart
from service.web.content.held import why_held
from service.web.content.job_rows import curve, measured
from trainer.spec.evaluation import figures_named, has_chart, is_table, title_of
from trainer.spec.stored_specs import StoredJob, best_epoch

HELD_OUT = ("validation", "test")
OVERFIT = 0.002
"""Decrease of validation AUC (or increase of RMSE) from the best to the last epoch that is reported as overfitting."""


def report(job: dict[str, Any]) -> dict[str, Any]:
    """Build the report of a job as shown to users.

    Returns:
        ``epochs`` (one row per epoch and split), ``best``, ``last``, a ``finding``, ``drift`` and ``warnings``.
        ``drift`` is the drift of the rows since the run that this run continues, None without such a run. ``warnings``
        are about the rows.
    """
    names_with_value = [name for metric in job["metrics"] for name, value in metric.items() if value is not None]
    name, sign = next(((figure, 1.0) for figure in figures_named("auc", names_with_value)), ("rmse", -1.0))
    if sign < 0:
        name = next(iter(figures_named("rmse", names_with_value)), name)
    validation = measured(job["metrics"], "validation", name)
    best = max(validation, key=lambda metric: sign * metric[name], default=None)
    last = validation[-1] if validation else None
    finding = "no validation AUC yet"
    if best is not None and last is not None:
        loss, word = sign * (best[name] - last[name]), title_of(name)
        if loss > OVERFIT:
            fell = "fell" if sign > 0 else "rose"
            finding = (
                f"validation {word} {fell} by {loss:.4f} from epoch {best['epoch']} to epoch {last['epoch']}: it "
                "overfits"
            )
        else:
            finding = f"validation {word} {last[name]:.4f}, at best {best[name]:.4f}: no overfitting seen"
    names = (
        "id", "name", "state", "dataset", "created_at", "started_at", "finished_at", "attempt", "attempts",
        "publication", "error",
    )  # fmt: skip
    fields = {name: job[name] for name in names}
    lineage = job.get("lineage") or {}
    conclusions: dict[str, Any] = {"finding": finding, "best": best, "last": last}
    conclusions |= {"drift": lineage.get("drift"), "warnings": lineage.get("warnings") or []}
    return {**fields, **conclusions, "metrics": job["metrics"], "spec": job["spec"]}


def epoch_chart(job: dict[str, Any], word: str, figures: Iterable[tuple[str, str]]) -> dict[str, Any] | None:
    """Return a chart named ``word`` of figures (split, metric) over epochs, with its curves; None without a value."""
    curves = [Series(split, curve(job["metrics"], split, name)) for split, name in figures]
    curves = [series for series in curves if series.points]
    if not curves:
        return None
    return {"word": word, "curves": curves, "svg": line_chart(curves, f"{word} per epoch of {job['name']}", word)}


def _tables(job: dict[str, Any], metric: str) -> list[tuple[dict[str, Any], str]]:
    """Return (last metrics with the table, name of the table) for each label and held-out split with such a table."""
    tables = []
    for name in figures_named(metric, (name for row in job["metrics"] for name in row)):
        last = {row["split"]: row for row in job["metrics"] if row.get(name)}
        tables += [(last[split], name) for split in HELD_OUT if split in last]
    return tables


def _calibration(metric: dict[str, Any], figure: str) -> dict[str, Any]:
    points = [(row["prediction"], row["share"]) for row in metric[figure]]
    label = figure.partition("/")[2]
    title = (
        f"Share of positives{f' of {label}' if label else ''} by prediction, {metric['split']}, epoch {metric['epoch']}"
    )
    return {"title": title, "svg": calibration_chart(points, title)}


def _buckets(metric: dict[str, Any], figure: str) -> dict[str, Any]:
    columns = list(metric[figure][0])
    label = figure.partition("/")[2]
    of = f"AUC of {label}, " if label else ""
    return {
        "title": f"Items by how often they were trained on, {of}{metric['split']}, epoch {metric['epoch']}",
        "columns": columns,
        "cells": [[_cell(row.get(name)) for name in columns] for row in metric[figure]],
    }


def charts_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the charts of all metrics that have values: each with its word, curves and SVG."""
    names = dict.fromkeys(name for metric_row in job["metrics"] for name in metric_row)
    charts = [
        epoch_chart(job, title_of(name), [(split, name) for split in HELD_OUT]) for name in names if has_chart(name)
    ]
    return [chart for chart in charts if chart is not None]


def figures_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job's metrics as tables: ``columns`` and ``cells`` by epoch, ``calibrations`` and ``buckets``.

    ``best`` is the best epoch by validation, as its cell shows it; empty without such an epoch.
    """
    columns = ["epoch", "split", *(name for metric in job["metrics"] for name in metric if not is_table(name))]
    columns = list(dict.fromkeys(columns))
    return {
        "best": _cell(best_epoch(job)),
        "columns": columns,
        "cells": [[_cell(metric.get(name)) for name in columns] for metric in job["metrics"]],
        "calibrations": [_calibration(metric, name) for metric, name in _tables(job, "calibration")],
        "buckets": [_buckets(metric, name) for metric, name in _tables(job, "frequency_buckets")],
    }


def as_html(job: dict[str, Any]) -> str:
    """Return the report as a page in the dashboard's style."""
    begun, ended = (job[name] and datetime.datetime.fromisoformat(job[name]) for name in ("started_at", "finished_at"))
    publication = job["publication"] or {}
    return rendering.page(
        "report.html",
        job=job,
        **figures_of(job),
        charts=charts_of(job),
        why=why_held(publication) if publication.get("status") == "held" else None,
        seconds=(ended - begun).total_seconds() if begun and ended else None,
        num_workers=StoredJob(job["spec"]).resources.num_workers,
        spec=json.dumps(job["spec"], indent=2),
    )


def _cell(value: Any) -> str:
    return f"{value:.5f}" if isinstance(value, float) else "" if value is None else str(value)
