"""Routes for liveness, readiness and Prometheus metrics."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse

from service.core import errors
from service.core.tenants import DEFAULT_TENANT
from service.identity.auth import KEY_IS_OPTIONAL, optional_principal, unauthorized
from service.identity.keys import Principal
from service.ops import collectors, readiness

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Check that the process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="Check the database, the disk and the background tasks", responses=errors.responses(503))
async def readyz(request: Request) -> dict[str, Any]:
    """Report whether the service is ready, and the state of its background tasks.

    ``degraded``: requests are answered and vectors are served, but jobs or schedules are not being processed or wait
    for free disk space, or the feature store's server is unreachable. In the role ``vectors`` it means that the
    database is down, which this role does not need. The role ``vectors`` is not ready while it has no vectors to serve.
    """
    state = await readiness.readiness(request.app.state)
    if state.unfit:
        failed = [{"field": name, "message": state.checks[name]} for name in state.unfit]
        detail = "; ".join(f"{error['field']}: {error['message']}" for error in failed)
        raise errors.Problem(503, "not-ready", detail, failed, {"Retry-After": "5"})
    return {"status": state.status, "checks": state.checks}


@router.get(
    "/metrics",
    summary="Prometheus metrics; requests from other machines need a key",
    response_class=PlainTextResponse,
    openapi_extra=KEY_IS_OPTIONAL,
)
async def metrics(request: Request, principal: Annotated[Principal | None, Depends(optional_principal)]) -> Response:
    if principal is None and not from_loopback(request):
        raise unauthorized("Only requests from this machine read metrics without a key.")
    if principal is not None and not (principal.tenant == DEFAULT_TENANT and principal.allows("jobs:read")):
        detail = "Metrics cover all tenants: reading them needs a key of the default tenant with the scope jobs:read."
        raise errors.Problem(403, "missing-scope", detail)
    state = request.app.state
    gauges = await collectors.of_service(state.settings, state.database, state.store, state.store_health)
    return Response(state.metrics.render(gauges), media_type="text/plain; version=0.0.4")


def from_loopback(request: Request) -> bool:
    """Return True if the peer is this machine and no proxy header says that the request was forwarded."""
    if request.client is None or "forwarded" in request.headers or "x-forwarded-for" in request.headers:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
