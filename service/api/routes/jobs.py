"""Routes to submit, list, cancel, retry and follow training jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import BaseModel

from service.api.middleware import entry_of
from service.core import errors, pagination, tables
from service.core.pagination import Page, Paging
from service.core.rows import AuditRow
from service.identity import idempotency
from service.identity.auth import JobsReader, JobsWriter, identify, require
from service.identity.idempotency import IdempotencyKey
from service.identity.keys import Principal
from service.jobs import job_records, output, submission
from service.jobs.job_row import JobView
from service.jobs.states import State
from service.web.report import as_html, report
from trainer.spec import JobSpec


def own(scope: str) -> Any:
    """Return a dependency that requires the scope, and responds 404 for a job that is missing or another tenant's.

    The job's row is stored in ``request.state.job``.
    """

    async def dependency(request: Request, job_id: str, principal: Principal = Depends(require(scope))) -> None:
        async with request.app.state.database.read() as connection:
            row = await job_records.get(connection, job_id, principal.sees)
        request.state.about, request.state.job = row["tenant"], row

    return Depends(dependency)


router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
READ = [own("jobs:read")]
WRITE = [own("jobs:write")]


class DryRun(BaseModel):
    """Response to a dry run of a job that would be accepted: the resources that the job is predicted to use."""

    valid: Literal[True] = True
    estimate: dict[str, Any]


DRY_RUN: dict[int | str, dict[str, Any]] = {
    200: {"model": DryRun, "description": "Response to a dry run, which submits nothing."}
}


@router.post("", status_code=202, response_model=JobView | DryRun, responses=DRY_RUN | errors.responses(409))
async def submit(
    request: Request,
    response: Response,
    body: JobSpec,
    principal: JobsWriter,
    dry_run: bool = False,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    state = request.app.state
    if dry_run:
        response.status_code = 200
        estimate = await submission.estimate(state.database, state.settings, body, principal.tenant)
        return {"valid": True, "estimate": estimate}
    entered = False

    def entry(job_id: str) -> AuditRow:
        nonlocal entered
        entered = True
        return entry_of(request.scope, principal, 202, f"/v1/jobs/{job_id}")

    job = await submission.submit(state.database, state.settings, body, principal, idempotency_key, entry)
    request.state.entered = entered  # for a submission that failed or created no job, the middleware writes the entry
    response.headers["Location"] = f"/v1/jobs/{job['id']}"
    return JobView(**job)


@router.get("")
async def list_jobs(
    request: Request,
    principal: JobsReader,
    paging: Paging,
    state: State | None = None,
    name: str | None = None,
    label: Annotated[
        str | None, Query(description="Only jobs with this label: `key=value`, or `key` for any value.")
    ] = None,
) -> Page[JobView]:
    query = job_records.listing(principal.sees, state, name, label)
    async with request.app.state.database.read() as connection:
        page = await pagination.page(connection, dict[str, Any], query, tables.job.c.id, paging, dict)
        items = await job_records.views(connection, page.items)
    return Page(items=[JobView(**item) for item in items], next_cursor=page.next_cursor)


@router.get("/{job_id}", dependencies=READ, responses=errors.responses(404))
async def get(request: Request, job_id: str) -> JobView:
    return JobView(**await _shown(request))


@router.post(
    "/{job_id}/cancel",
    status_code=202,
    dependencies=WRITE,
    responses={200: {"model": JobView, "description": "The job was already cancelled."}, **errors.responses(404, 409)},
)
async def cancel(request: Request, response: Response, job_id: str) -> JobView:
    """Cancel a job: 202; 200 if it was cancelled before; 409 if it has succeeded or failed."""
    async with request.app.state.database.write() as connection:
        row, changed = await job_records.cancel(connection, job_id)
        shown = await job_records.view(connection, row)
    response.status_code = 202 if changed else 200
    return JobView(**shown)


@router.post("/{job_id}/retry", status_code=202, dependencies=WRITE, responses=errors.responses(404, 409))
async def retry(
    request: Request, job_id: str, principal: JobsWriter, idempotency_key: IdempotencyKey = None
) -> JobView:
    """Queue a failed or cancelled job again; it continues from its last checkpoint."""
    database = request.app.state.database

    async def act(reservation: idempotency.Reservation | None) -> None:
        async with database.write() as connection:
            # The limit of the job's own tenant counts: an operator may retry jobs of other tenants.
            await job_records.refuse_too_many(database, connection, request.app.state.settings, request.state.about)
            await job_records.retry(connection, job_id)
            await idempotency.complete(connection, reservation, job_id=job_id)

    await idempotency.once(database, principal.key_id, idempotency_key, f"retry {job_id}", act)
    async with database.read() as connection:
        return JobView(**await job_records.view(connection, await job_records.get(connection, job_id)))


@router.delete("/{job_id}", status_code=204, dependencies=WRITE, responses=errors.responses(404, 409))
async def delete(request: Request, job_id: str) -> None:
    await job_records.delete(request.app.state.database, request.app.state.settings, job_id)


@router.get("/{job_id}/logs", dependencies=READ, response_class=Response, responses=errors.responses(404))
async def logs(request: Request, job_id: str, offset: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> Response:
    """Return the log from byte ``offset`` on, at most 1 MiB.

    ``Evenkeel-Next-Offset`` is the offset for the next request. The header is 0 if the log ends before ``offset``: a
    new log has then replaced the previous log.
    """
    directory = request.app.state.settings.run_dir(job_id)
    text = await asyncio.to_thread(output.read_log, directory, offset)
    following = await asyncio.to_thread(output.log_offset, directory, offset + len(text))
    headers = {"Evenkeel-Next-Offset": str(following)}
    return Response(text, media_type="text/plain; charset=utf-8", headers=headers)


@router.get(
    "/{job_id}/events",
    dependencies=READ,
    response_class=StreamingResponse,
    responses=errors.also(204, "The job has ended and all its events were sent.") | errors.responses(404),
)
async def events(request: Request, job_id: str, last_event_id: Annotated[str | None, Header()] = None) -> Response:
    """Stream events until the job has ended: ``state``, ``metric``, ``preparation``, ``progress``, ``log``.

    Responds 204 if the job has ended and all its events were sent. The stream also ends when the key or session expires
    or is revoked.
    """
    at = output.position(last_event_id)
    state = request.app.state
    first = await output.batch(state.database, state.settings, job_id, at)
    if first.ended:
        return Response(status_code=204)

    async def may_read() -> bool:
        try:
            return await identify(request) is not None
        except errors.Problem:
            return False

    body = output.stream(state.database, state.settings, job_id, first, may_read)
    return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.get("/{job_id}/report", dependencies=READ, response_model=None, responses=errors.responses(404))
async def get_report(request: Request, job_id: str) -> Response | dict[str, Any]:
    """Return the report as JSON, or as HTML if the Accept header prefers it."""
    document = report(JobView(**await _shown(request)).model_dump(mode="json"))
    return HTMLResponse(as_html(document)) if "text/html" in request.headers.get("accept", "") else document


async def _shown(request: Request) -> dict[str, Any]:
    """Return the job in ``request.state.job``, stored by :func:`own`, as users see it."""
    row = request.state.job
    if not row["attempt"]:
        return job_records.view_of_new(row)
    async with request.app.state.database.read() as connection:
        return await job_records.view(connection, row)
