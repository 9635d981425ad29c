"""A filtered list of jobs, a page at a time, with the curves of the jobs on the page."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from service.core import pagination, tables
from service.jobs import job_records
from service.jobs.states import STATES
from service.web.charts.lines import Series, line_chart
from service.web.content.job_rows import curve, job_row, last_auc, of_first_label
from service.web.request import DashboardRequest
from trainer.spec.stored_specs import StoredJob

NUM_JOBS = 25
LINES_PER_CHART = 6
CHARTS = 4
SPLITS = ("validation", "test", "train")
FILTERS = ("search", "state", "label")


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return a page of the jobs that the query of the address asks for."""
    filters = {name: request.asked(name) for name in FILTERS}
    state = filters["state"] if filters["state"] in STATES else None
    query = job_records.listing(
        request.principal.sees, state, None, filters["label"], search=(filters["search"] or "").lower() or None
    )
    async with request.state.database.read() as connection:
        page = await pagination.page(connection, dict[str, Any], query, tables.job.c.id, request.paging(NUM_JOBS), dict)
        shown = await job_records.views(connection, page.items)
    set_filters = {name: value for name, value in filters.items() if value is not None}
    return {
        "jobs": [job_row(job, tables.now()) for job in shown],
        "charts": charts(shown),
        "filters": filters,
        "is_filtered": bool(set_filters),
        "states": STATES,
        "older": f"?{urlencode({**set_filters, 'cursor': page.next_cursor})}" if page.next_cursor else None,
        "newest": f"?{urlencode(set_filters)}" if request.asked("cursor") else None,
    }


def charts(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one chart per dataset, newest first: AUC over epochs of its latest jobs, for comparing runs."""
    by_dataset: dict[str, list[dict[str, Any]]] = {}
    for job in shown:
        if last_auc(job["metrics"]) is not None:
            by_dataset.setdefault(job["dataset"], []).append(job)
    return [_chart(dataset, jobs[:LINES_PER_CHART]) for dataset, jobs in list(by_dataset.items())[:CHARTS]]


def _chart(dataset: str, shown: list[dict[str, Any]]) -> dict[str, Any]:
    def aucs(job: dict[str, Any], split: str) -> list[tuple[int, float]]:
        return curve(job["metrics"], split, of_first_label(job["metrics"], "auc"))

    split = next(split for split in SPLITS if any(aucs(job, split) for job in shown))
    # Oldest first, so that a job keeps its colour while it is followed.
    series = [(job, Series(job["name"], aucs(job, split))) for job in reversed(shown) if aucs(job, split)]
    lines = [
        {
            "id": job["id"],
            "name": job["name"],
            "optimizer": StoredJob(job["spec"]).optimizer_kind,
            "points": line.points,
            "best": max(line.points, key=lambda point: point[1]),
            "last": line.points[-1],
        }
        for job, line in series
    ]
    title = f"{split} AUC per epoch on {dataset}: " + ", ".join(
        f"{line['name']} ends at {line['last'][1]:.4f}" for line in lines
    )
    epochs = sorted({epoch for line in lines for epoch, _ in line["points"]})
    svg = line_chart([line for _, line in series], title)
    return {"dataset": dataset, "split": split, "svg": svg, "lines": lines, "epochs": epochs}
