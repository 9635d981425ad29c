"""The content of the dashboard, gathered and put into words; the templates only lay it out."""

from __future__ import annotations

import datetime
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.store import Store
from service.core import pagination, tables, tenants
from service.core.errors import Problem
from service.core.pagination import PageRequest
from service.core.rows import FiringRow, ScheduleRow, all_rows, first_row
from service.features.store_access import in_store
from service.features.summaries import summary
from service.identity.keys import Principal
from service.jobs import job_records
from service.schedules import schedule_records
from service.web.charts import Series, line_chart
from trainer.spec.evaluation import figures_named
from trainer.spec.stored import StoredJob

NUM_JOBS = 30
NUM_SCHEDULES = 100
NUM_VERSIONS = 6
LINES_PER_CHART = 6
CHARTS = 4
SPLITS = ("validation", "test", "train")


async def gather(app: FastAPI, principal: Principal) -> dict[str, Any]:
    """Return everything on the page that this key may see; a part that it may not see is None."""
    content: dict[str, Any] = {
        "jobs": None,
        "charts": None,
        "schedules": None,
        "collections": None,
        "store_away": None,
    }
    if principal.allows("jobs:read"):
        async with app.state.database.read() as connection:
            query = job_records.listing(principal.sees, None, None, None)
            page = await pagination.page(
                connection, dict[str, Any], query, tables.job.c.id, PageRequest(NUM_JOBS), dict
            )
            shown = await job_records.views(connection, page.items)
            content["schedules"] = await _schedules(connection, principal.tenant)
        content["jobs"] = [job_row(job, tables.now()) for job in shown]
        content["charts"] = charts(shown)
    if principal.allows("features:read"):
        try:
            content["collections"] = await in_store(_collections, tenants.store_of(app.state.store, principal.tenant))
        except Problem as problem:
            if problem.status != 503:
                raise
            content["store_away"] = problem.detail  # jobs and schedules are to be seen all the same
    return content


def job_row(job: dict[str, Any], now: datetime.datetime) -> dict[str, Any]:
    """Return a job's row in the table: percent done, seconds taken, last AUC per split, why held, what failed."""
    progress, publication = job["progress"] or {}, job["publication"] or {}
    begun, ended = job["started_at"], job["finished_at"]
    return {
        **job,
        "percent": percent_prepared(job["preparation"]) if job["preparation"] else percent_done(job["state"], progress),
        "epoch": f"{progress['epoch']}/{progress['epochs']}" if progress.get("epochs") else "",
        "rate": progress.get("examples_per_second"),
        "seconds": None if begun is None else ((ended or now) - begun).total_seconds(),
        "auc": last_auc(job["metrics"]),
        "rmse": last_value(job["metrics"], "rmse"),
        "published": publication.get("status") if publication.get("status") != "none" else None,
        "version": publication.get("version"),
        "collection": publication.get("collection"),
        "reasons": publication.get("reasons") or [],
        "optimizer": StoredJob(job["spec"]).optimizer_kind,
    }


def percent_prepared(preparation: dict[str, Any]) -> int | None:
    """Return the share of a stage's rows that are done, in percent; None where their number is not known."""
    total = preparation["total_rows"]
    return min(99, int(100 * preparation["rows"] / total)) if total else None


def percent_done(state: str, progress: dict[str, Any]) -> int | None:
    """Return the share of the epochs done, in percent; within an epoch only if the run reports its number of steps."""
    if state in ("succeeded", "publishing"):
        return 100
    epochs = progress.get("epochs")
    if not epochs:
        return None
    if progress.get("steps"):
        return min(99, int(100 * (progress.get("step") or 0) / progress["steps"]))
    return min(99, int(100 * max((progress.get("epoch") or 0) - 1, 0) / epochs))


def last_auc(metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the latest epoch's AUC on the first of test, validation, train that has one."""
    return last_value(metrics, "auc")


def last_value(metrics: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the latest epoch's value of any metric, of several labels of the first, chosen as in :func:`last_auc`."""
    name = of_first_label(metrics, name)
    for split in ("test", "validation", "train"):
        measured = [one for one in metrics if one["split"] == split and one.get(name) is not None]
        if measured:
            return {"split": split, "value": measured[-1][name], "epoch": measured[-1]["epoch"]}
    return None


def of_first_label(metrics: list[dict[str, Any]], name: str) -> str:
    """Return the name of a metric in these: its own, or of several labels that of the first which has it."""
    return next(iter(figures_named(name, (figure for one in metrics for figure in one))), name)


def charts(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one chart per dataset, newest first: AUC over epochs of its latest jobs, for comparing runs."""
    by_dataset: dict[str, list[dict[str, Any]]] = {}
    for job in shown:
        if last_auc(job["metrics"]) is not None:
            by_dataset.setdefault(job["dataset"], []).append(job)
    return [_chart(dataset, jobs_[:LINES_PER_CHART]) for dataset, jobs_ in list(by_dataset.items())[:CHARTS]]


def _chart(dataset: str, shown: list[dict[str, Any]]) -> dict[str, Any]:
    def curve(job: dict[str, Any], split: str) -> list[tuple[int, float]]:
        auc = of_first_label(job["metrics"], "auc")
        metrics = [one for one in job["metrics"] if one["split"] == split and one.get(auc) is not None]
        return [(one["epoch"], one[auc]) for one in metrics]

    split = next(split for split in SPLITS if any(curve(job, split) for job in shown))
    # Oldest first, so that a job keeps its colour while it is followed.
    series = [(job, Series(job["name"], curve(job, split))) for job in reversed(shown) if curve(job, split)]
    lines = [
        {
            "id": job["id"],
            "name": job["name"],
            "optimizer": StoredJob(job["spec"]).optimizer_kind,
            "points": one.points,
            "best": max(one.points, key=lambda point: point[1]),
            "last": one.points[-1],
        }
        for job, one in series
    ]
    title = f"{split} AUC per epoch on {dataset}: " + ", ".join(
        f"{line['name']} ends at {line['last'][1]:.4f}" for line in lines
    )
    epochs = sorted({epoch for line in lines for epoch, _ in line["points"]})
    svg = line_chart([one for _, one in series], title)
    return {"dataset": dataset, "split": split, "svg": svg, "lines": lines, "epochs": epochs}


async def _schedules(connection: AsyncConnection, tenant: str) -> list[dict[str, Any]]:
    own = sa.select(tables.schedule).where(tables.schedule.c.tenant == tenant)
    table, schedules = tables.firing, []
    for row in await all_rows(connection, ScheduleRow, own.order_by(tables.schedule.c.name).limit(NUM_SCHEDULES)):
        latest = sa.select(table).where(table.c.schedule_id == row["id"]).order_by(table.c.fire_at_utc.desc()).limit(1)
        firing = await first_row(connection, FiringRow, latest)
        last = None if firing is None else schedule_records.firing_view(firing, row["name"])
        schedules.append({**schedule_records.view(row), "last": last})
    return schedules


def _collections(store: Store) -> list[dict[str, Any]]:
    collections = []
    for name in store.collections():
        collection = store.collection(name)
        versions = collection.versions()[::-1][:NUM_VERSIONS]
        collections.append({**summary(collection), "versions": versions})
    return collections
