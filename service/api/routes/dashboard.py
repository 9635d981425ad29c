"""The dashboard at ``/``: pages rendered on the server, and the content that their script refreshes."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, Response

from service.core import errors
from service.features.store_access import unchanged
from service.identity.auth import optional_principal, unauthorized
from service.identity.keys import Principal
from service.web import rendering
from service.web.dashboard import gather

router = APIRouter(tags=["dashboard"], include_in_schema=False)

MaybePrincipal = Annotated[Principal | None, Depends(optional_principal)]


@router.get("/")
async def page(request: Request, principal: MaybePrincipal) -> Response:
    """Return the dashboard, or the form that exchanges a key for a session cookie."""
    if principal is None:
        html = rendering.page("login.html")
    else:
        html = rendering.page("dashboard.html", **await gather(request.app, principal))
    return HTMLResponse(html, headers={"Cache-Control": "no-store"})


@router.get("/dashboard/content")
async def content(request: Request, principal: MaybePrincipal) -> Response:
    """Return the part of the page that changes; 304 while it is unchanged."""
    if principal is None:
        raise unauthorized("The session has ended.")
    html = rendering.page("content.html", **await gather(request.app, principal))
    etag = f'"{hashlib.blake2b(html.encode(), digest_size=16).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "no-store"}
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    return HTMLResponse(html, headers=headers)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in rendering.STATIC:
        raise errors.not_found("file", name)
    body, _ = rendering.static_file(name)
    return Response(
        body, media_type=rendering.STATIC[name], headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )
