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
from service.web import pages, rendering
from service.web.pages import Page

router = APIRouter(tags=["dashboard"], include_in_schema=False)

MaybePrincipal = Annotated[Principal | None, Depends(optional_principal)]


def add_routes(router: APIRouter, page: Page) -> None:
    """Serve a page at its address, and what is in its frame at its source."""

    @router.get(page.address)
    async def whole_page(request: Request, principal: MaybePrincipal) -> Response:
        return await whole(request, principal, page)

    @router.get(page.source)
    async def changing_content(request: Request, principal: MaybePrincipal) -> Response:
        return await changing(request, principal, page)


async def whole(request: Request, principal: Principal | None, page: Page) -> Response:
    """Return a page in the dashboard's frame, or the form that exchanges a key for a session cookie."""
    if principal is None:
        html = rendering.page("login.html")
    else:
        values = await page.gather(request.app, principal)
        html = rendering.page("dashboard.html", page=page, pages=pages.PAGES, principal=principal, **values)
    return HTMLResponse(html, headers={"Cache-Control": "no-store"})


async def changing(request: Request, principal: Principal | None, page: Page) -> Response:
    """Return what is in the frame of a page; 304 while it is unchanged."""
    if principal is None:
        raise unauthorized("The session has ended.")
    html = rendering.page(page.template, **await page.gather(request.app, principal))
    etag = f'"{hashlib.blake2b(html.encode(), digest_size=16).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "no-store"}
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    return HTMLResponse(html, headers=headers)


for one in pages.PAGES:
    add_routes(router, one)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in rendering.STATIC:
        raise errors.not_found("file", name)
    body, _ = rendering.static_file(name)
    return Response(
        body, media_type=rendering.STATIC[name], headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )
