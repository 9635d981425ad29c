"""Liveness, readiness, Prometheus metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Request, Response

from service import errors
from service.auth import optional_principal, unauthorized
from service.keys import Principal
from service.settings import MIN_FREE_BYTES

router = APIRouter(tags=["health"])

READY_SECONDS = 5.0


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get(
    "/readyz", summary="Database and disk are usable; how the background tasks do", responses=errors.responses(503)
)
async def readyz(request: Request) -> dict[str, Any]:
    """``degraded``: requests are answered, vectors are served, but jobs or schedules are not looked after; in the role
    ``vectors``, that the database is down, which it does without."""
    checks = {"database": await _database(request), "disk": _disk(request)}
    needed = ("disk",) if request.app.state.settings.role == "vectors" else tuple(checks)
    failed = [{"field": name, "message": checks[name]} for name in needed if checks[name] != "ok"]
    status = "ok" if checks["database"] == "ok" else "degraded"
    for pulse in request.app.state.pulses:
        fit, checks[pulse.name] = pulse.verdict()
        if not fit:
            status = "degraded"
    if failed:
        said = "; ".join(f"{error['field']}: {error['message']}" for error in failed)
        raise errors.Problem(503, "not-ready", said, failed, {"Retry-After": "5"})
    return {"status": status, "checks": checks}


@router.get("/metrics", summary="Prometheus metrics; without a key on loopback only")
async def metrics(request: Request, principal: Annotated[Principal | None, Depends(optional_principal)]) -> Response:
    if principal is None and not from_loopback(request):
        raise unauthorized("Metrics are public on loopback only.")
    state = request.app.state
    database = None if state.settings.role == "vectors" else state.database
    text = await state.metrics.render(database, state.settings, state.store.damaged())
    return Response(text, media_type="text/plain; version=0.0.4")


def from_loopback(request: Request) -> bool:
    """Whether the peer is this machine itself and no proxy says that it speaks for another."""
    if request.client is None or "forwarded" in request.headers or "x-forwarded-for" in request.headers:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


async def _database(request: Request) -> str:
    try:
        async with asyncio.timeout(READY_SECONDS), request.app.state.database.read() as connection:
            await connection.execute(sa.text("SELECT version_num FROM alembic_version"))
    except Exception as error:  # whatever the driver raises is the answer here, not a failure of the route
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "ok"


def _disk(request: Request) -> str:
    try:
        free = shutil.disk_usage(request.app.state.settings.home).free
    except OSError as error:
        return str(error)
    return "ok" if free >= MIN_FREE_BYTES else f"{free} bytes free under EVENKEEL_HOME: make room"
