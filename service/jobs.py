"""Jobs in the database: created, moved between states, shown, removed. Plain async functions over a connection."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from service import tables
from service.database import Database
from service.errors import Problem, invalid, not_found
from service.settings import Settings
from service.states import ACTIVE, TERMINAL, Happening, Refused, transition
from trainer.spec import FIRING_DATE, DatasetSpec, JobSpec

Row = dict[str, Any]
DELETED = ".deleted-"
SPLITS = ("train", "validation", "test")


async def check(connection: AsyncConnection, spec: JobSpec) -> DatasetSpec:
    """The registered dataset that the job names. Raises 422 naming each field that does not fit."""
    name = spec.dataset.name
    query = sa.select(tables.dataset.c.spec).where(tables.dataset.c.name == name)
    document = await connection.scalar(query)
    if document is None:
        remedy = "register it with POST /v1/datasets or 'evenkeel datasets add FILE.yaml'"
        raise invalid([("dataset.name", f"no dataset '{name}' is registered")], remedy)
    dataset = DatasetSpec.model_validate(document)
    try:
        spec.against(dataset)
    except ValueError as error:
        raise invalid([_field(part) for part in str(error).split("; ")]) from None
    if spec.init_from is not None and spec.init_from.job is not None:
        known = await connection.scalar(sa.select(tables.job.c.id).where(tables.job.c.id == spec.init_from.job))
        if known is None:
            raise invalid(
                [("init_from.job", f"there is no job '{spec.init_from.job}'")], "name a job that has run here"
            )
    return dataset


def _field(problem: str) -> tuple[str, str]:
    field, separator, message = problem.partition(": ")
    return (field, message) if separator and " " not in field else ("", problem)


def refuse_firing_date(spec: JobSpec) -> None:
    """A job on its own has no firing: its window must name a date."""
    if spec.dataset.window is not None and spec.dataset.window.start == FIRING_DATE:
        remedy = "give a date (YYYY-MM-DD), or submit the job as a schedule"
        raise invalid([("dataset.window.start", f"{FIRING_DATE} is filled in by schedules only")], remedy)


async def create(
    connection: AsyncConnection, spec: JobSpec, dataset: DatasetSpec, schedule: tuple[str, str] | None = None
) -> Row:
    """A queued job. ``schedule``: id and name of the one that fired."""
    row: Row = {
        "id": tables.new_id("job"),
        "name": spec.name,
        "state": "queued",
        "reason": None,
        "spec": spec.model_dump(mode="json"),
        "dataset_spec": dataset.model_dump(mode="json"),
        "schedule_id": schedule[0] if schedule else None,
        "schedule": schedule[1] if schedule else None,
        "created_at": tables.now(),
        "attempt": 0,
        "failures": 0,
        "released": True,
        "events_offset": 0,
    }
    await connection.execute(tables.job.insert().values(row))
    labels = [{"job_id": row["id"], "key": key, "value": value} for key, value in spec.labels.items()]
    if labels:
        await connection.execute(tables.job_label.insert(), labels)
    await record(connection, row["id"], "state", {"state": "queued", "attempt": 0, "time": _text(row["created_at"])})
    return await locked(connection, row["id"])


async def get(connection: AsyncConnection, job_id: str) -> Row:
    """The row as it is. Raises 404."""
    return await _one(connection, sa.select(tables.job).where(tables.job.c.id == job_id), job_id)


async def locked(connection: AsyncConnection, job_id: str) -> Row:
    """The row, which no other writer changes until this transaction ends. Raises 404."""
    query = sa.select(tables.job).where(tables.job.c.id == job_id).with_for_update()
    return await _one(connection, query, job_id)


async def _one(connection: AsyncConnection, query: sa.Select[Any], job_id: str) -> Row:
    row = (await connection.execute(query)).mappings().first()
    if row is None:
        raise not_found("job", job_id)
    return dict(row)


async def change(connection: AsyncConnection, row: Row, **values: Any) -> None:
    """Writes columns of a locked row, and the same into ``row``."""
    await connection.execute(tables.job.update().where(tables.job.c.id == row["id"]).values(values))
    row.update(values)


async def record(connection: AsyncConnection, job_id: str, kind: str, data: dict[str, Any]) -> None:
    """An event for those who follow the job."""
    await connection.execute(tables.job_event.insert().values(job_id=job_id, type=kind, data=data))


async def move(connection: AsyncConnection, row: Row, happening: Happening, **values: Any) -> str | Refused:
    """One transition of a locked row, with the columns that change with it, and its event. Refused: nothing changed."""
    state = transition(row["state"], happening)
    if isinstance(state, Refused):
        return state
    now = tables.now()
    if state in TERMINAL:
        values = {"finished_at": now, "reason": None, **values}
    await change(connection, row, state=state, **values)
    data = {"state": state, "attempt": row["attempt"], "time": _text(now), "reason": row["reason"]}
    if state in TERMINAL:
        data |= {"publication": row["publication"], "error": row["error"]}
    await record(connection, row["id"], "state", data)
    return state


async def cancel(connection: AsyncConnection, job_id: str) -> tuple[Row, bool]:
    """(the job, whether this request changed it). Raises 409 for one that has succeeded or failed."""
    row = await locked(connection, job_id)
    state = await move(connection, row, "cancel", reason=None)
    if isinstance(state, Refused) and not state.ignored:
        raise Problem(409, "job-finished", f"Job {job_id} has {row['state']}: there is nothing to cancel.")
    return row, not isinstance(state, Refused)


async def retry(connection: AsyncConnection, job_id: str) -> Row:
    """Queues a failed or cancelled job again; it goes on from its last checkpoint. Raises 409 otherwise."""
    row = await locked(connection, job_id)
    fresh = {"failures": 0, "error": None, "publication": None, "started_at": None, "finished_at": None}
    if isinstance(
        await move(connection, row, "retry", reason=None, not_before=None, launched_at=None, **fresh), Refused
    ):
        remedy = "Submit its spec as a new job." if row["state"] == "succeeded" else "Cancel it first, or let it end."
        detail = f"Job {job_id} is {row['state']}: only a failed or cancelled job can be retried. {remedy}"
        raise Problem(409, "job-not-retryable", detail)
    return row


async def delete(database: Database, settings: Settings, job_id: str) -> None:
    """Removes an ended job, its checkpoints and its log. Versions that it published stay. Raises 409 while it runs."""
    directory = settings.run_dir(job_id)
    doomed = directory.with_name(f"{DELETED}{job_id}")
    async with database.write() as connection:
        row = await locked(connection, job_id)
        if row["state"] not in TERMINAL or not row["released"]:
            detail = f"Job {job_id} is {row['state']} or still ending. Cancel it and wait until its processes are gone."
            raise Problem(409, "job-not-finished", detail)
        await connection.execute(tables.idempotency.delete().where(tables.idempotency.c.job_id == job_id))
        await connection.execute(tables.job.delete().where(tables.job.c.id == job_id))
        if directory.exists():
            directory.rename(doomed)
    # Gigabytes of checkpoints: not while holding the write lock. What a crash leaves, the next start removes.
    await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)


def listing(state: str | None, name: str | None, label: str | None) -> sa.Select[Any]:
    """Jobs by filter. ``label`` is ``key=value`` or ``key``."""
    query = sa.select(tables.job)
    if state is not None:
        query = query.where(tables.job.c.state == state)
    if name is not None:
        query = query.where(tables.job.c.name == name)
    if label is not None:
        key, equals, value = label.partition("=")
        labels = tables.job_label
        match = sa.select(labels.c.job_id).where(labels.c.key == key)
        query = query.where(tables.job.c.id.in_(match.where(labels.c.value == value) if equals else match))
    return query


async def views(connection: AsyncConnection, rows: list[Row]) -> list[dict[str, Any]]:
    """Jobs as users see them, with the metrics of each."""
    table = tables.job_metric
    ids = [row["id"] for row in rows]
    found: dict[str, list[dict[str, Any]]] = {job_id: [] for job_id in ids}
    for metric in (await connection.execute(sa.select(table).where(table.c.job_id.in_(ids)))).mappings():
        found[metric["job_id"]].append({"epoch": metric["epoch"], "split": metric["split"], **metric["values"]})
    for metrics in found.values():
        metrics.sort(key=lambda one: (one["epoch"], SPLITS.index(one["split"]) if one["split"] in SPLITS else 9))
    return [_view(row, found[row["id"]]) for row in rows]


async def view(connection: AsyncConnection, row: Row) -> dict[str, Any]:
    return (await views(connection, [row]))[0]


_SHOWN = (
    "id", "name", "state", "reason", "created_at", "started_at", "finished_at", "attempt", "progress", "publication",
    "error", "schedule", "parent_version", "spec",
)  # fmt: skip


def _view(row: Row, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    shown = {name: row[name] for name in _SHOWN}
    return {**shown, "dataset": row["spec"]["dataset"]["name"], "labels": row["spec"]["labels"], "metrics": metrics}


async def active_of(connection: AsyncConnection, schedule_id: str) -> list[str]:
    """The jobs of a schedule that have not ended."""
    ids = await connection.scalars(
        sa.select(tables.job.c.id)
        .where(tables.job.c.schedule_id == schedule_id, tables.job.c.state.in_(("queued", *ACTIVE)))
        .order_by(tables.job.c.id)
    )
    return list(ids)


def _text(time: Any) -> str:
    return str(time.isoformat(timespec="milliseconds").replace("+00:00", "Z"))
