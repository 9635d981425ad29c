"""Routes for liveness, readiness and Prometheus metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse

from service.core import disk, errors
from service.core.tenants import DEFAULT_TENANT
from service.identity.auth import optional_principal, unauthorized
from service.identity.keys import Principal
from service.ops import collectors

router = APIRouter(tags=["health"])

READY_SECONDS = 5.0
log = logging.getLogger("evenkeel")


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get(
    "/readyz", summary="Database and disk are usable; how the background tasks do", responses=errors.responses(503)
)
async def readyz(request: Request) -> dict[str, Any]:
    """Report whether the service is ready, and the state of its background tasks.

    ``degraded``: requests are answered and vectors are served, but jobs or schedules are not being processed or wait
    for free disk space, or the feature store's server is unreachable. In the role ``vectors`` it means that the
    database is down, which this role does not need. That role is not ready while it has no vectors to serve.
    """
    level, said_of_disk = _disk(request)
    checks = {"database": await _database(request), "disk": said_of_disk}
    fit_for_requests = {
        "database": checks["database"] == "ok" or request.app.state.settings.role == "vectors",
        "disk": level != "full",
    }
    store = await asyncio.to_thread(request.app.state.store_health.answer, READY_SECONDS)
    if store is not None:
        checks["store"] = store.message
        fit_for_requests["store"] = store.serves or request.app.state.settings.role != "vectors"
    failed = [{"field": name, "message": checks[name]} for name, fit in fit_for_requests.items() if not fit]
    well = checks["database"] == "ok" and level in ("ok", "low") and (store is None or store.reached)
    status = "ok" if well else "degraded"
    for task in request.app.state.task_health:
        fit, checks[task.name] = task.verdict()
        if not fit:
            status = "degraded"
    if failed:
        detail = "; ".join(f"{error['field']}: {error['message']}" for error in failed)
        raise errors.Problem(503, "not-ready", detail, failed, {"Retry-After": "5"})
    return {"status": status, "checks": checks}


@router.get("/metrics", summary="Prometheus metrics; without a key on loopback only", response_class=PlainTextResponse)
async def metrics(request: Request, principal: Annotated[Principal | None, Depends(optional_principal)]) -> Response:
    if principal is None and not from_loopback(request):
        raise unauthorized("Metrics are public on loopback only.")
    if principal is not None and not (principal.tenant == DEFAULT_TENANT and principal.allows("jobs:read")):
        detail = "Metrics are of all tenants: a key of the default tenant with the scope jobs:read reads them."
        raise errors.Problem(403, "missing-scope", detail)
    state = request.app.state
    gauges = await collectors.of_service(state.settings, state.database, state.store)
    return Response(state.metrics.render(gauges), media_type="text/plain; version=0.0.4")


def from_loopback(request: Request) -> bool:
    """Tell whether the peer is this machine and no proxy header says that the request was forwarded."""
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
        # Everybody may ask; where the database is and who asks for it as whom is for the log.
        log.error("database: %s: %s", type(error).__name__, error)
        return "cannot be used: the service's log says why"
    return "ok"


def _disk(request: Request) -> tuple[disk.Level, str]:
    try:
        free_space = disk.space(request.app.state.settings)
    except OSError as error:
        log.error("disk: %s", error)
        return "full", "EVENKEEL_HOME cannot be looked at: the service's log says why"
    return free_space.level, free_space.message
