"""Jobs side by side: their curves by epoch, their last figures, and where their specs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from service.core import tables
from service.core.errors import invalid, not_found
from service.jobs import job_records
from service.web.charts.lines import Series, line_chart
from service.web.content.job_rows import curve, job_row
from service.web.request import DashboardRequest
from trainer.spec.evaluation import has_chart, is_lower_better, is_table, title_of
from trainer.spec.problems import FieldProblem

MAX_JOBS = 6
"""Most jobs in a comparison: the charts have six colours."""
SPLITS = ("validation", "test", "train")
NO_METRICS = ("epoch", "split", "examples", "users")
ABSENT = "–"


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return the content for the jobs that the query names as ``job``, in that order, and for the query's ``metric``.

    Raises:
        Problem: 422 for more than MAX_JOBS jobs, 404 for a job that is not of the key's tenant.
    """
    ids = list(dict.fromkeys(request.query.getlist("job")))
    if len(ids) > MAX_JOBS:
        raise invalid(FieldProblem("job", f"there are {len(ids)} jobs", f"compare at most {MAX_JOBS}"))
    query = job_records.listing(request.principal.sees, None, None, None).where(tables.job.c.id.in_(ids))
    async with request.state.database.read() as connection:
        rows = (await connection.execute(query)).mappings().all()
        jobs_by_id = {job["id"]: job for job in await job_records.views(connection, [dict(row) for row in rows])}
    for job_id in ids:
        if job_id not in jobs_by_id:
            raise not_found("job", job_id)
    jobs = [jobs_by_id[job_id] for job_id in ids]
    metrics, found = metrics_of(jobs), differences([job["spec"] for job in jobs])
    metric = request.asked("metric")
    metric = metric if metric in metrics else next(iter(metrics), None)
    return {
        "jobs": [job_row(job, tables.now()) for job in jobs],
        "metrics": metrics,
        "metric": metric,
        "charts": [] if metric is None else curves(jobs, metric),
        "last": last_figures(jobs, metrics),
        "differences": [row for row in found if not _publishes(row[0])],
        "publishing": [row for row in found if _publishes(row[0])],
    }


def _publishes(path: str) -> bool:
    """Return True for a field of ``publish``: a job that publishes has dozens of such fields, another job none."""
    return path.partition(".")[0] == "publish"


def metrics_of(jobs: list[dict[str, Any]]) -> list[str]:
    """Return the names of all metrics that are one number per epoch; metrics shown as charts elsewhere come first."""
    names = dict.fromkeys(name for job in jobs for metric in job["metrics"] for name in metric)
    numbers = [name for name in names if name not in NO_METRICS and not is_table(name)]
    return sorted(numbers, key=lambda name: not has_chart(name))


def curves(jobs: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return a chart for each split that has the metric; a job has the same colour in all of them."""
    charts = []
    for split in SPLITS:
        series = [Series(job["name"], curve(job["metrics"], split, metric)) for job in jobs]
        if any(line.points for line in series):
            charts.append(
                {"split": split, "svg": line_chart(series, f"{split} {title_of(metric)} per epoch", title_of(metric))}
            )
    return charts


def last_figures(jobs: list[dict[str, Any]], metrics: list[str]) -> list[dict[str, Any]]:
    """Return, for each split and metric, every job's value in its last epoch (None if missing) and the best value."""
    rows = []
    for split in SPLITS:
        for metric in metrics:
            points = [curve(job["metrics"], split, metric) for job in jobs]
            values = [point[-1][1] if point else None for point in points]
            known_values = [value for value in values if value is not None]
            if known_values:
                best = (min if is_lower_better(metric) else max)(known_values)
                rows.append({"split": split, "metric": metric, "values": values, "best": best})
    return rows


def differences(documents: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (path, each document's value) of every field that is not the same in all of them."""
    flat = [{path: ABSENT if value is None else str(value) for path, value in leaves(one)} for one in documents]
    paths = dict.fromkeys(path for fields in flat for path in fields)
    rows = [(path, [fields.get(path, ABSENT) for fields in flat]) for path in paths]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each field of a document that is no mapping."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value
