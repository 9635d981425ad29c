"""Routes for runs on other machines, authorized by the token of their attempt; not in the public document.

Each route concerns one run. A token of another run is refused with 403, and a token of an abandoned attempt with 409.
Tokens are those of :mod:`service.identity.run_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.durable_files import write_json
from service.core import tables
from service.core.errors import Problem, invalid
from service.core.rows import first_row
from service.identity import run_tokens
from service.identity.auth import unauthorized
from service.identity.run_tokens import Claim
from service.jobs.job_row import JobRow
from service.jobs.states import ACTIVE
from trainer.runs.directory import RUN_FILE
from trainer.runs.events import EVENTS_FILE
from trainer.runs.protocol import EXIT_FILE
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/internal/runs/{run_id}", include_in_schema=False)
Result = TypeVar("Result")


def claim_of(request: Request, run_id: str) -> Claim:
    """Return the content of the request's token: run, attempt and lease.

    Raises:
        Problem: 401 without a valid token, 403 for the token of another run.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    claim = run_tokens.read(request.app.state.settings.home, token.strip()) if scheme.lower() == "bearer" else None
    if claim is None:
        raise unauthorized(
            "This route needs the token that the service gave to the run; the token sent is unknown or expired."
        )
    if claim.run_id != run_id:
        raise Problem(403, "another-run", f"The token belongs to run {claim.run_id} and gives no access to other runs.")
    return claim


Claimed = Annotated[Claim, Depends(claim_of)]


@router.get("")
async def run_document(request: Request, claim: Claimed) -> Response:
    """Return the attempt's ``run.json``."""
    async with request.app.state.database.read() as connection:
        await _held(connection, claim)
    path = request.app.state.settings.run_dir(claim.run_id) / RUN_FILE
    try:
        document = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        raise _storage_unavailable("The file run.json of the run cannot be read", error) from error
    if json.loads(document)["attempt"] != claim.attempt:
        _given_up(claim)  # the next attempt began meanwhile, with another lease and token
    return Response(document, media_type="application/json")


@router.get("/current", status_code=204)
async def current(request: Request, claim: Claimed) -> None:
    """Answer 204 if the attempt may still publish."""
    async with request.app.state.database.read() as connection:
        row = await _held(connection, claim)
    if row["state"] not in ACTIVE:
        _given_up(claim)


@router.post("/events")
async def events(
    request: Request, claim: Claimed, offset: Annotated[int, Query(ge=0, lt=2**63)]
) -> dict[str, int | str | None]:
    """Append the lines of the request's body, which begin at byte ``offset`` of the event file, to that file.

    The response has the file's new length in bytes, and a new token if the current token is more than a day old.
    """
    lines = await request.body()
    if not lines.endswith(b"\n"):
        raise invalid(FieldProblem("body", "the last line is incomplete", "send complete lines only"))
    directory = request.app.state.settings.run_dir(claim.run_id)
    end, row = await _written(request, claim, lambda: append_events(directory, offset, lines))
    renewed = None
    if claim.is_old:
        assert row["lease"] is not None  # _held() has checked the lease
        renewed = run_tokens.issue(request.app.state.settings.home, claim.run_id, claim.attempt, row["lease"])
    return {"offset": end, "token": renewed}


@router.put("/exit", status_code=204)
async def last_word(request: Request, claim: Claimed) -> None:
    """Store the request's body as the attempt's ``exit.json``, which says how the attempt ended."""
    try:
        document = json.loads(await request.body())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("attempt") != claim.attempt:
        raise invalid(
            FieldProblem("body", f"is not the exit.json of attempt {claim.attempt}", "send the file unchanged")
        )
    directory = request.app.state.settings.run_dir(claim.run_id)
    await _written(request, claim, lambda: write_json(directory / EXIT_FILE, document))


async def _written(request: Request, claim: Claim, write: Callable[[], Result]) -> tuple[Result, JobRow]:
    """Call ``write`` while the job's row is locked, and return its result and the row."""
    async with request.app.state.database.write() as connection:
        row = await _held(connection, claim)
        try:
            return await asyncio.to_thread(write), row
        except OSError as error:
            raise _storage_unavailable("The run's report cannot be written", error) from error


def _storage_unavailable(what: str, error: OSError) -> Problem:
    detail = f"{what}: {error.strerror or error}."
    return Problem(503, "storage-unavailable", detail, headers={"Retry-After": "10"})


async def _held(connection: AsyncConnection, claim: Claim) -> JobRow:
    """Return the job's row, locked for writing; raise 409 unless the attempt is still the job's current attempt."""
    query = sa.select(tables.job).where(tables.job.c.id == claim.run_id).with_for_update()
    row = await first_row(connection, JobRow, query)
    if row is None or not run_tokens.holds(claim, row):
        _given_up(claim)
    return row


def _given_up(claim: Claim) -> NoReturn:
    detail = f"Attempt {claim.attempt} of {claim.run_id} was given up or has ended: its reports are no longer accepted."
    raise Problem(409, "run-given-up", detail)


def append_events(run_dir: Path, offset: int, lines: bytes) -> int:
    """Append complete ``lines``, which begin at byte ``offset`` of the event file, and return its length in bytes.

    Lines that exist already are skipped, and nothing is written if something before them is missing. The file is on
    disk when this returns. The call blocks.
    """
    descriptor = os.open(run_dir / EVENTS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = os.fstat(descriptor).st_size
        if offset > end:
            return end
        fresh = lines[end - offset :]
        while fresh:
            written = os.write(descriptor, fresh)
            end, fresh = end + written, fresh[written:]
        os.fsync(descriptor)
        return end
    finally:
        os.close(descriptor)
