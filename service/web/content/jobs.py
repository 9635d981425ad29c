"""A table of jobs: filtered, sorted by any column, with a metric and the parameters that differ, and its curves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import urlencode

from service.core import pagination, tables
from service.core.errors import invalid
from service.core.pagination import PageRequest
from service.jobs import job_records
from service.jobs.states import STATES
from service.web.charts.lines import Series, line_chart
from service.web.content.compare import differences, leaves, metrics_of
from service.web.content.job_rows import best_figures, curve, job_row, measured, of_first_label, seconds_of
from service.web.request import DashboardRequest
from trainer.spec.evaluation import is_lower_better, title_of
from trainer.spec.problems import FieldProblem
from trainer.spec.stored_specs import StoredJob

NUM_JOBS = 25
SORTED_JOBS = 250
"""Most jobs that are sorted, the newest of those that match the filters; their specs and metrics are read each time."""
NUM_PARAMETERS = 3
"""Columns of parameters, unless the query names some."""
LINES_PER_CHART = 6
CHARTS = 4
SPLITS = ("validation", "test", "train")
FILTERS = ("search", "state", "label")
SHOWN_APART = ("name", "dataset.name", "labels.", "publish", "tracking")
"""Beginnings of the paths of fields that the table shows otherwise, or that do not change the model."""


class Column(NamedTuple):
    """A column by which jobs are sorted.

    Attributes:
        key: its name in the query's ``sort``, after "-" for the largest value first.
        value: function from a job's row to what is compared; jobs without a value come last.
        first: order of the first click: "-" if large values are the interesting ones.
        is_code: True if the title is the path of a field.
    """

    key: str
    title: str
    value: Callable[[dict[str, Any]], Any]
    first: str = ""
    is_code: bool = False


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return a page of the jobs that the query of the address asks for.

    Raises:
        Problem: 422 for a column that does not exist.
    """
    filters = {name: request.asked(name) for name in FILTERS}
    state = filters["state"] if filters["state"] in STATES else None
    query = job_records.listing(
        request.principal.sees, state, None, filters["label"], search=(filters["search"] or "").lower() or None
    )
    paging = request.paging(NUM_JOBS) if request.asked("sort") is None else PageRequest(SORTED_JOBS)
    async with request.state.database.read() as connection:
        page = await pagination.page(connection, dict[str, Any], query, tables.job.c.id, paging, dict)
        found = await job_records.views(connection, page.items)
    return await asyncio.to_thread(_table, request, found, page.next_cursor, filters)


def _table(
    request: DashboardRequest, found: list[dict[str, Any]], cursor: str | None, filters: dict[str, str | None]
) -> dict[str, Any]:
    """Return the page's values from the jobs that were found; ``cursor``: that of the jobs after them, if any."""
    metrics, sort = metrics_of(found), request.asked("sort")
    metric = request.asked("metric") or next(iter(metrics), "auc")
    fields = [dict(leaves(job["spec"])) for job in found]
    differing = [path for path, _ in differences(fields) if not path.startswith(SHOWN_APART)]
    parameters = list(dict.fromkeys(filter(None, request.query.getlist("parameter")))) or differing[:NUM_PARAMETERS]
    columns = _columns(metric, parameters)
    rows = [{**job, "best": best_figures(job, metric), "fields": of} for job, of in zip(found, fields, strict=True)]
    start = 0
    if sort is not None:
        column = next((one for one in columns if one.key == sort.removeprefix("-")), None)
        if column is None:
            raise invalid(FieldProblem("sort", f"there is no column '{sort}'", "sort by a heading of the table"))
        asked = request.asked("start") or "0"
        start = int(asked) if asked.isdecimal() and len(asked) < 10 else 0
        rows = in_order(rows, column.value, descending=sort.startswith("-"))
    following = {"cursor": cursor} if sort is None else {"start": str(start + NUM_JOBS)}
    is_last = cursor is None if sort is None else start + NUM_JOBS >= len(rows)
    shown = rows[start : start + NUM_JOBS]
    return {
        "jobs": [job_row(job, tables.now()) for job in shown],
        "charts": charts(shown, metric),
        "filters": filters,
        "asked": [(name, value) for name, value in request.query.multi_items() if value],
        "states": STATES,
        "metric": metric,
        "metrics": list(dict.fromkeys([*metrics, metric])),
        "columns": [_heading(request, column, sort) for column in columns],
        "parameters": parameters,
        "differing": list(dict.fromkeys([*parameters, *differing])),
        "sort": sort,
        "num_sorted": SORTED_JOBS if sort is not None and cursor is not None else None,
        "older": None if is_last else _link(request, **following),
        "newest": _link(request) if request.asked("cursor") or start else None,
    }


def _columns(metric: str, parameters: Iterable[str]) -> list[Column]:
    def field(path: str) -> Callable[[dict[str, Any]], Any]:
        return lambda row: row["fields"].get(path)

    def published(row: dict[str, Any]) -> str | None:
        publication = row["publication"] or {}
        return publication.get("version") and f"{publication['collection']} {publication['version']}"

    first, title = "" if is_lower_better(metric) else "-", title_of(metric)
    return [
        Column("name", "Job", lambda row: row["name"]),
        Column("state", "State", lambda row: row["state"]),
        Column("validation", f"{title}, validation", lambda row: row["best"]["validation"], first),
        Column("test", f"{title}, test", lambda row: row["best"]["test"], first),
        Column("epoch", "Best epoch", lambda row: row["best"]["epoch"]),
        *(Column(path, path, field(path), is_code=True) for path in parameters),
        Column("published", "Published", published),
        Column("created", "Created", lambda row: row["created_at"], "-"),
        Column("took", "Took", lambda row: seconds_of(row, tables.now()), "-"),
    ]


def in_order(
    rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], Any], *, descending: bool
) -> list[dict[str, Any]]:
    """Return the rows by their values, numbers before texts; those without a value are last in either direction."""

    def key(row: dict[str, Any]) -> tuple[bool, Any]:
        found = value(row)
        is_text = isinstance(found, str | bool | list | dict)
        return is_text, str(found) if is_text else found

    there = [row for row in rows if value(row) is not None]
    missing = [row for row in rows if value(row) is None]
    return sorted(there, key=key, reverse=descending) + missing


def _heading(request: DashboardRequest, column: Column, sort: str | None) -> dict[str, Any]:
    """Return a column's heading: its link sorts by it, and in the other direction if it is sorted by already."""
    up, down = column.key, f"-{column.key}"
    other = {up: down, down: up}.get(sort or "", column.first + column.key)
    direction = {up: "ascending", down: "descending"}.get(sort or "")
    return {**column._asdict(), "link": _link(request, sort=other), "direction": direction, "up": up, "down": down}


def _link(request: DashboardRequest, **changes: str | None) -> str:
    """Return the query of this view with changes; it begins at the first page."""
    left_out = {"cursor", "start", *changes}
    kept = [(name, value) for name, value in request.query.multi_items() if value and name not in left_out]
    return f"?{urlencode([*kept, *changes.items()])}"


def charts(shown: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return one chart per dataset: the metric over epochs of the jobs that are listed first, for comparing runs."""
    by_dataset: dict[str, list[dict[str, Any]]] = {}
    for job in shown:
        name = of_first_label(job["metrics"], metric)
        if any(measured(job["metrics"], split, name) for split in SPLITS):
            by_dataset.setdefault(job["dataset"], []).append(job)
    return [_chart(dataset, jobs[:LINES_PER_CHART], metric) for dataset, jobs in list(by_dataset.items())[:CHARTS]]


def _chart(dataset: str, shown: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    def values(job: dict[str, Any], split: str) -> list[tuple[int, float]]:
        return curve(job["metrics"], split, of_first_label(job["metrics"], metric))

    split = next(split for split in SPLITS if any(values(job, split) for job in shown))
    # Oldest first, so that a job keeps its colour while it is followed.
    by_age = sorted(shown, key=lambda job: str(job["id"]))
    series = [(job, Series(job["name"], values(job, split))) for job in by_age if values(job, split)]
    best = min if is_lower_better(metric) else max
    lines = [
        {
            "id": job["id"],
            "name": job["name"],
            "optimizer": StoredJob(job["spec"]).optimizer_kind,
            "points": line.points,
            "best": best(line.points, key=lambda point: point[1]),
            "last": line.points[-1],
        }
        for job, line in series
    ]
    title = f"{split} {title_of(metric)} per epoch on {dataset}: " + ", ".join(
        f"{line['name']} ends at {line['last'][1]:.4f}" for line in lines
    )
    epochs = sorted({epoch for line in lines for epoch, _ in line["points"]})
    svg = line_chart([line for _, line in series], title, title_of(metric))
    return {"dataset": dataset, "split": split, "svg": svg, "lines": lines, "epochs": epochs}
