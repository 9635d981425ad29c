"""The dashboard at ``/``: pages rendered on the server, and the content that their script refreshes."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, Response
from starlette.concurrency import run_in_threadpool

from service.core import errors
from service.core.errors import Problem
from service.features.store_access import store_problems, unchanged
from service.identity.auth import optional_principal, unauthorized
from service.identity.keys import Principal
from service.web import pages, rendering
from service.web.content import submit
from service.web.pages import Gather, Page, Part, source_of
from service.web.request import DashboardRequest

router = APIRouter(tags=["dashboard"], include_in_schema=False)

MaybePrincipal = Annotated[Principal | None, Depends(optional_principal)]


def add_routes(router: APIRouter, page: Page) -> None:
    """Add routes for a page: the whole page at its address, and the content of its frame at ``page.source``."""

    @router.get(page.address)
    async def whole_page(request: Request, principal: MaybePrincipal) -> Response:
        return await whole(request, principal, page)

    @router.get(page.source)
    async def changing_content(request: Request, principal: MaybePrincipal) -> Response:
        return await changing(request, principal, page)


def add_part(router: APIRouter, part: Part) -> None:
    """Add a route for a part of a page, at the part's address."""

    @router.get(part.address)
    async def one_part(request: Request, principal: MaybePrincipal) -> Response:
        return await changing(request, principal, part)


async def whole(request: Request, principal: Principal | None, page: Page) -> Response:
    """Return a page in the dashboard's frame, or without a principal the login form, which asks for a key."""
    status = 200
    if principal is None:
        html = rendering.page("login.html")
    else:
        page_request = _asked(request, principal)
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        frame = {"page": page, "pages": pages.PAGES, "request": page_request, "source": source_of(address)}
        try:
            template, values = await _content(page_request, page)
        except Problem as problem:
            status, template, values = problem.status, "problem.html", {"problem": problem.body()}
            frame["source"] = None
        html = rendering.page("frame.html", content=template, **frame, **values)
    return HTMLResponse(html, status, headers={"Cache-Control": "no-store"})


async def changing(request: Request, principal: Principal | None, page: Page | Part) -> Response:
    """Return the content of a page's frame, or part of a page; 304 if the browser already has this content."""
    if principal is None:
        raise unauthorized("The session has ended.")
    page_request = _asked(request, principal)
    template, values = await _content(page_request, page)
    html = rendering.page(template, request=page_request, **values)
    etag = f'"{hashlib.blake2b(html.encode(), digest_size=16).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "no-store"}
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    return HTMLResponse(html, headers=headers)


async def _content(request: DashboardRequest, page: Page | Part) -> tuple[str, dict[str, Any]]:
    """Return a page's template and values; if the key lacks the page's scope, the template that says so."""
    if page.scope is not None and not request.allows(page.scope):
        return "lacking.html", {"scope": page.scope}
    gather: Gather = page.gather
    with store_problems():
        return page.template, await gather(request)


def _asked(request: Request, principal: Principal) -> DashboardRequest:
    return DashboardRequest(request.app, principal, request.path_params, request.query_params)


for page in pages.PAGES:
    add_routes(router, page)
for part in pages.PARTS:
    add_part(router, part)


@router.post("/dashboard/parts/spec")
async def spec(request: Request, principal: MaybePrincipal) -> Response:
    """Return a spec as JSON from a body of YAML, for the editor; it changes nothing."""
    if principal is None:
        raise unauthorized("The session has ended.")
    text = (await request.body()).decode("utf-8", "replace")
    return Response(await run_in_threadpool(submit.read_spec, text), media_type="application/json")


@router.get(pages.UNKNOWN.address)
async def unknown(request: Request, principal: MaybePrincipal) -> Response:
    return await whole(request, principal, pages.UNKNOWN)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in rendering.STATIC:
        raise errors.not_found("file", name)
    body, _ = rendering.static_file(name)
    return Response(
        body, media_type=rendering.STATIC[name], headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )
