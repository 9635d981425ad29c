"""Jobs in the database: created, moved between states, shown, removed. Plain async functions over a connection."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.refresh.settings import MAX_HELD
from service.core import tables
from service.core.database import Database, insert_together
from service.core.errors import Problem, invalid, not_found
from service.core.rows import as_row, first_row
from service.core.settings import Settings
from service.jobs.job_row import JobRow, JobView
from service.jobs.states import ACTIVE, TERMINAL, Refused, Trigger, transition
from service.jobs.stored_runs import remove_run
from service.webhooks import webhook_records
from trainer.runs import tracing
from trainer.spec import FIRING_DATE, DatasetSpec, JobSpec
from trainer.spec.problems import FieldProblem, InvalidFieldsError
from trainer.spec.stored_specs import StoredJob

DELETED = ".deleted-"
SPLITS = ("train", "validation", "test")
MAX_LABELS = 64
"""Most labels of a job; each label is a row in the database."""
MAX_ATTEMPTS = 100
"""Most attempts stored for display, since a job that is preempted may have any number."""
# Built once, because SQLAlchemy takes longer to build a statement than to send it.
_INSERT_EVENT = tables.job_event.insert()
_BY_ID = sa.select(tables.job).where(tables.job.c.id == sa.bindparam("job_id"))
_LOCKED_BY_ID = _BY_ID.with_for_update()
_METRICS = sa.select(tables.job_metric).where(tables.job_metric.c.job_id.in_(sa.bindparam("ids", expanding=True)))
_DATASET = sa.select(tables.dataset.c.spec).where(
    tables.dataset.c.tenant == sa.bindparam("tenant"), tables.dataset.c.name == sa.bindparam("name")
)


async def check(connection: AsyncConnection, spec: JobSpec, tenant: str) -> tuple[JobSpec, DatasetSpec]:
    """Return the job with the defaults that its dataset decides, and the tenant's dataset that it names.

    Raises:
        Problem: 422 that names each field that does not fit.
    """
    if len(spec.labels) > MAX_LABELS:
        message = f"there are {len(spec.labels)}, but a job may have at most {MAX_LABELS}"
        raise invalid(FieldProblem("labels", message, "leave some out"))
    name = spec.dataset.name
    document = await connection.scalar(_DATASET, {"tenant": tenant, "name": name})
    if document is None:
        remedy = "register it with 'evenkeel datasets add FILE.yaml' (POST /v1/datasets)"
        raise invalid(FieldProblem("dataset.name", f"no dataset '{name}' is registered", remedy))
    dataset = DatasetSpec.model_validate(document)
    try:
        spec = spec.against(dataset)
    except InvalidFieldsError as error:
        raise invalid(*error.problems) from None
    await check_start(connection, spec, tenant)
    return spec, dataset


async def check_start(connection: AsyncConnection, spec: JobSpec, tenant: str) -> None:
    """Check that the job named by ``init_from`` is the tenant's, and prevent its removal until the transaction ends.

    Raises:
        Problem: 422 if the tenant has no such job.
    """
    if spec.init_from is None or spec.init_from.job is None:
        return
    held = _held(spec.init_from.job).where(tables.job.c.tenant == tenant)
    if await connection.scalar(held) is None:
        raise invalid(
            FieldProblem("init_from.job", f"there is no job '{spec.init_from.job}'", "name a job that has run here")
        )


def _held(job_id: str) -> sa.Select[Any]:
    """Return a query for a job's id that keeps retention from removing its checkpoints until the transaction ends."""
    query = sa.select(tables.job.c.id).where(tables.job.c.id == job_id)
    return query.with_for_update(read=True, key_share=True)


async def refuse_too_many(database: Database, connection: AsyncConnection, settings: Settings, tenant: str) -> None:
    """Check that the tenant may have one more job.

    Other transactions that call this then wait for the end of this transaction, so that no two count the same number of
    jobs.

    Raises:
        Problem: 409 if one more job would exceed the tenant's limit.
    """
    limit = settings.tenant_max_jobs
    if limit is None:
        return
    await database.exclusive(connection, f"jobs of {tenant}")
    unfinished = sa.and_(tables.job.c.tenant == tenant, tables.job.c.state.not_in(TERMINAL))
    count = await connection.scalar(sa.select(sa.func.count()).select_from(tables.job).where(unfinished))
    if (count or 0) >= limit:
        detail = f"{count} jobs wait or run, but a tenant may have at most {limit} (EVENKEEL_TENANT_MAX_JOBS)."
        remedy = "wait until one has ended, or cancel one"
        raise Problem(409, "too-many-jobs", detail, [{"message": detail, "remedy": remedy}])


def refuse_firing_date(spec: JobSpec) -> None:
    """Check that the window of a job without a schedule names a date, since there is no firing to take a date from.

    Raises:
        Problem: 422 if the window begins at the firing date.
    """
    if spec.dataset.window is not None and spec.dataset.window.start == FIRING_DATE:
        remedy = "give a date (YYYY-MM-DD), or submit the job as a schedule"
        raise invalid(FieldProblem("dataset.window.start", f"only schedules fill in {FIRING_DATE}", remedy))


async def create(
    connection: AsyncConnection,
    spec: JobSpec,
    dataset: DatasetSpec,
    tenant: str,
    schedule: tuple[str, str] | None = None,
    *,
    job_id: str | None = None,
    needs: dict[str, Any] | None = None,
    beside: Sequence[tuple[sa.Table, Mapping[str, object]]] = (),
) -> JobRow:
    """Create a queued job and return its row.

    ``schedule``: id and name of the schedule that fired the job. ``needs``: the job's resource request as JSON, if
    known. ``beside``: rows to insert together with the job, each with its table.
    """
    columns: dict[str, Any] = {
        **dict.fromkeys(column.name for column in tables.job.c),
        "id": job_id or tables.new_id("job"),
        "tenant": tenant,
        "name": spec.name,
        "state": "queued",
        "spec": spec.model_dump(mode="json"),
        "dataset_spec": dataset.model_dump(mode="json"),
        "schedule_id": schedule[0] if schedule else None,
        "schedule": schedule[1] if schedule else None,
        "created_at": tables.now(),
        "attempt": 0,
        "failures": 0,
        "released": True,
        "events_offset": 0,
        "needs": needs,
        "traceparent": tracing.traceparent(),
    }
    row = as_row(JobRow, columns)
    event = {"state": "queued", "attempt": 0, "time": _text(row["created_at"])}
    # None is left out: in a JSON column it would be stored as JSON's null.
    rows: list[tuple[sa.Table, Mapping[str, object]]] = [
        (tables.job, {name: one for name, one in row.items() if one is not None})
    ]
    rows += [(tables.job_label, {"job_id": row["id"], "key": key, "value": one}) for key, one in spec.labels.items()]
    rows += [(tables.job_event, {"job_id": row["id"], "type": "state", "data": event}), *beside]
    await insert_together(connection, rows)
    return row


async def get(connection: AsyncConnection, job_id: str, tenant: str | None = None) -> JobRow:
    """Return the job's row without locking it; ``tenant`` None allows any tenant.

    Raises:
        Problem: 404 if there is no such job.
    """
    row = await _one(connection, _BY_ID, job_id)
    if tenant not in (None, row["tenant"]):
        raise not_found("job", job_id)
    return row


async def locked(connection: AsyncConnection, job_id: str) -> JobRow:
    """Return the job's row, locked so that no other transaction changes it until this one ends.

    Raises:
        Problem: 404 if there is no such job.
    """
    return await _one(connection, _LOCKED_BY_ID, job_id)


async def _one(connection: AsyncConnection, query: sa.Select[Any], job_id: str) -> JobRow:
    row = await first_row(connection, JobRow, query, {"job_id": job_id})
    if row is None:
        raise not_found("job", job_id)
    return row


async def change(connection: AsyncConnection, row: JobRow, **values: Any) -> None:
    """Write columns of a locked row to the database, and the same values into ``row``."""
    await connection.execute(tables.job.update().where(tables.job.c.id == row["id"]).values(values))
    cast(dict[str, Any], row).update(values)


def with_attempt(
    attempts: list[dict[str, Any]] | None, attempt: int, workers: int, because: str | None
) -> list[dict[str, Any]]:
    """Return the last MAX_ATTEMPTS of ``attempts`` after adding ``attempt``, or replacing it if it is in the list."""
    earlier = [other for other in attempts or [] if other["attempt"] != attempt]
    return [*earlier, {"attempt": attempt, "workers": workers, "because": because}][-MAX_ATTEMPTS:]


def workers_of(attempts: list[dict[str, Any]] | None) -> int | None:
    """Return the number of workers with which the last attempt began; None if unknown."""
    return attempts[-1]["workers"] if attempts else None


async def record(connection: AsyncConnection, job_id: str, kind: str, data: dict[str, Any]) -> None:
    """Insert an event of the job for clients that follow it."""
    await connection.execute(_INSERT_EVENT, {"job_id": job_id, "type": kind, "data": data})


async def move(connection: AsyncConnection, row: JobRow, happening: Trigger, **values: Any) -> str | Refused:
    """Apply one state transition to a locked row, write ``values`` to its columns, and record an event.

    Returns:
        The new state, or Refused if nothing was changed.
    """
    state = transition(row["state"], happening)
    if isinstance(state, Refused):
        return state
    now = tables.now()
    if state in TERMINAL:
        values = {"finished_at": now, "reason": None, **values}
    if row["preparation"] is not None and state not in ("starting", "cancelling"):
        values = {"preparation": None, **values}
    await change(connection, row, state=state, **values)
    data = {"state": state, "attempt": row["attempt"], "time": _text(now), "reason": row["reason"]}
    if happening == "claimed":
        data |= {"workers": workers_of(row["attempts"])}
    if state in TERMINAL:
        data |= {"publication": row["publication"], "error": row["error"]}
        await _tell(connection, row)
    await record(connection, row["id"], "state", data)
    return state


async def _tell(connection: AsyncConnection, row: JobRow) -> None:
    """Queue webhook deliveries about the end of a job and the outcome of its publication."""
    await webhook_records.tell(connection, row["tenant"], f"job.{row['state']}", _told(row))  # type: ignore[arg-type]
    if (row["publication"] or {}).get("step") is None:
        await tell_publication(connection, row)


async def tell_publication(connection: AsyncConnection, row: JobRow) -> None:
    """Queue webhook deliveries about the outcome of a job's publication, if it has an outcome."""
    for event in _events_of(row["publication"] or {}):
        await webhook_records.tell(connection, row["tenant"], event, _told(row))


def _told(row: JobRow) -> dict[str, Any]:
    fields = {name: row[name] for name in ("name", "state", "attempt", "schedule", "error", "publication")}
    return {"job": row["id"], **fields, "labels": StoredJob(row["spec"]).labels}


def _events_of(publication: Mapping[str, Any]) -> Iterator[webhook_records.Event]:
    """Yield the names of a publication's webhook events.

    Additional events are yielded if it ends a series of held versions, or if the series has reached ``max_held``.
    """
    if publication.get("status") == "published":
        yield "publication.published"
        if publication.get("released"):
            yield "publication.released"
    elif publication.get("status") == "held":
        yield "publication.held"
        if publication.get("held_in_a_row", 1) >= publication.get("max_held", MAX_HELD):
            yield "publication.held_repeatedly"


async def cancel(connection: AsyncConnection, job_id: str) -> tuple[JobRow, bool]:
    """Cancel a job; return (its row, True if this request changed it).

    Raises:
        Problem: 409 if the job has succeeded or failed.
    """
    row = await locked(connection, job_id)
    state = await move(connection, row, "cancel", reason=None)
    if isinstance(state, Refused) and not state.ignored:
        raise Problem(409, "job-finished", f"Job {job_id} has {row['state']}: there is nothing to cancel.")
    return row, not isinstance(state, Refused)


async def retry(connection: AsyncConnection, job_id: str) -> JobRow:
    """Queue a failed or cancelled job again; it continues from its last checkpoint.

    Raises:
        Problem: 409 for a job in any other state.
    """
    row = await locked(connection, job_id)
    start = StoredJob(row["spec"]).parent_job
    if start is not None:
        await connection.execute(_held(start))
    fresh = {"failures": 0, "error": None, "publication": None, "started_at": None, "finished_at": None}
    moved = await move(connection, row, "retry", reason=None, not_before=tables.now(), launched_at=None, **fresh)
    if isinstance(moved, Refused):
        remedy = "Submit its spec as a new job." if row["state"] == "succeeded" else "Cancel it first, or let it end."
        detail = f"Job {job_id} is {row['state']}: only a failed or cancelled job can be retried. {remedy}"
        raise Problem(409, "job-not-retryable", detail)
    return row


async def starts(connection: AsyncConnection) -> set[str]:
    """Return the jobs that ``init_from`` names in a schedule or in a job that has not ended.

    For a job that this transaction has locked, the answer stays true until the transaction ends: another transaction
    that names the job locks it too (:func:`check_start`).
    """
    waiting = sa.select(tables.job.c.spec).where(tables.job.c.state.not_in(TERMINAL))
    specs = [*await connection.scalars(waiting), *await connection.scalars(sa.select(tables.schedule.c.job))]
    return {job for spec in specs if (job := StoredJob(spec).parent_job) is not None}


async def delete(database: Database, settings: Settings, job_id: str, *, sweeping: bool = False) -> None:
    """Remove an ended job, its checkpoints and its log; versions that it published stay.

    ``sweeping``: True if retention removes the job; it must keep a job from which a schedule or another job is to
    start.

    Raises:
        Problem: 409 while the job runs or, with ``sweeping``, if a schedule or another job is to start from it.
    """
    directory = settings.run_dir(job_id)
    doomed = directory.with_name(f"{DELETED}{job_id}")
    async with database.write() as connection:
        row = await locked(connection, job_id)
        if row["state"] not in TERMINAL or not row["released"]:
            detail = f"Job {job_id} is {row['state']} or still ending. Cancel it and wait until its processes are gone."
            raise Problem(409, "job-not-finished", detail)
        if sweeping and job_id in await starts(connection):
            raise Problem(409, "job-needed", f"A job or schedule is to start from the checkpoints of job {job_id}.")
        await connection.execute(tables.idempotency.delete().where(tables.idempotency.c.job_id == job_id))
        await connection.execute(tables.job.delete().where(tables.job.c.id == job_id))
        if directory.exists():
            directory.rename(doomed)
    # Not while holding the write lock, because gigabytes of checkpoints take time. The next start removes what a crash
    # leaves.
    await asyncio.to_thread(remove_run, doomed)


def listing(
    tenant: str | None, state: str | None, name: str | None, label: str | None, *, search: str | None = None
) -> sa.Select[Any]:
    """Return a query for the jobs that match all filters given.

    ``tenant`` None selects all tenants; ``label`` is ``key=value`` or ``key``; ``search`` is a part of the name, or the
    id.
    """
    query = _LISTED
    if tenant is not None:
        query = query.where(tables.job.c.tenant == tenant)
    if state is not None:
        query = query.where(tables.job.c.state == state)
    if name is not None:
        query = query.where(tables.job.c.name == name)
    if search is not None:
        query = query.where(tables.job.c.name.contains(search, autoescape=True) | (tables.job.c.id == search))
    if label is not None:
        key, equals, value = label.partition("=")
        labels = tables.job_label
        match = sa.select(labels.c.job_id).where(labels.c.key == key)
        query = query.where(tables.job.c.id.in_(match.where(labels.c.value == value) if equals else match))
    return query


async def views(connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return jobs as users see them, with their metrics."""
    metrics_of: dict[str, list[dict[str, Any]]] = {row["id"]: [] for row in rows}
    begun = [row["id"] for row in rows if row["attempt"]]
    for metric in (await connection.execute(_METRICS, {"ids": begun})).mappings() if begun else ():
        metrics_of[metric["job_id"]].append({"epoch": metric["epoch"], "split": metric["split"], **metric["values"]})
    for metrics in metrics_of.values():
        metrics.sort(key=lambda row: (row["epoch"], SPLITS.index(row["split"]) if row["split"] in SPLITS else 9))
    return [_view(row, metrics_of[row["id"]]) for row in rows]


async def view(connection: AsyncConnection, row: JobRow) -> dict[str, Any]:
    return (await views(connection, [row]))[0]


def view_of_new(row: JobRow) -> dict[str, Any]:
    """Return the view of a job that was just created, which has no metrics yet."""
    return _view(row, [])


_SHOWN = tuple(name for name in JobView.model_fields if name in tables.job.c)
_LISTED = sa.select(*(tables.job.c[name] for name in _SHOWN))


def _view(row: Mapping[str, Any], metrics: list[dict[str, Any]]) -> dict[str, Any]:
    shown, spec = {name: row[name] for name in _SHOWN}, StoredJob(row["spec"])
    shown["attempts"] = shown["attempts"] or []
    return {**shown, "dataset": spec.dataset_name, "labels": spec.labels, "metrics": metrics}


async def active_of(connection: AsyncConnection, schedule_id: str) -> list[str]:
    """Return the jobs of a schedule that have not ended."""
    ids = await connection.scalars(
        sa.select(tables.job.c.id)
        .where(tables.job.c.schedule_id == schedule_id, tables.job.c.state.in_(("queued", *ACTIVE)))
        .order_by(tables.job.c.id)
    )
    return list(ids)


def _text(time: datetime.datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
