"""API keys, and the exchange of a key for the dashboard's session cookie."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Body, Depends, Query, Request, Response
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from service import errors, keys, pages, tables
from service.auth import COOKIE, optional_principal, require, same_origin, unauthorized
from service.keys import Principal
from service.pages import Page
from trainer.spec import Name

router = APIRouter(tags=["keys"])


def _in_utc(at: datetime.datetime) -> datetime.datetime:
    try:
        return at.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError(f"{at.isoformat()} is beyond the year 9999 in UTC") from None


class KeyRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    scopes: list[Literal["jobs:read", "jobs:write", "features:read", "features:write", "admin"]] = Field(min_length=1)
    expires_at: Annotated[AwareDatetime, AfterValidator(_in_utc)] | None = None


class KeyView(BaseModel):
    """A key without its secret."""

    id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: datetime.datetime
    expires_at: datetime.datetime | None
    revoked_at: datetime.datetime | None


class NewKey(KeyView):
    key: str = Field(description="The key itself: shown this once, kept nowhere.")


class SessionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: str = Field(min_length=1, max_length=512)


@router.post("/v1/keys", status_code=201)
async def create(request: Request, body: KeyRequest, admin: Annotated[Principal, Depends(require("admin"))]) -> NewKey:
    if body.expires_at is not None and body.expires_at <= tables.now():
        raise errors.invalid([("expires_at", "lies in the past")], "give a later time, or none")
    async with request.app.state.database.write() as connection:
        key, row = await keys.create(connection, body.name, list(dict.fromkeys(body.scopes)), body.expires_at)
    return NewKey(key=key, **{name: row[name] for name in KeyView.model_fields})


@router.get("/v1/keys", dependencies=[Depends(require("admin"))])
async def list_keys(
    request: Request, limit: Annotated[int, Query(ge=1, le=200)] = 50, cursor: str | None = None
) -> Page[KeyView]:
    async with request.app.state.database.read() as connection:
        rows, following = await pages.newest_first(
            connection, sa.select(tables.api_key), tables.api_key.c.id, limit, cursor
        )
    return Page(
        items=[KeyView(**{name: row[name] for name in KeyView.model_fields}) for row in rows], next_cursor=following
    )


@router.delete("/v1/keys/{key_id}", status_code=204, responses=errors.responses(404))
async def revoke(request: Request, key_id: str, admin: Annotated[Principal, Depends(require("admin"))]) -> None:
    async with request.app.state.database.write() as connection:
        if not await keys.revoke(connection, key_id):
            raise errors.not_found("key", key_id)
    request.app.state.authenticator.forget()


@router.post("/session", status_code=204, tags=["dashboard"])
async def open_session(request: Request, body: Annotated[SessionRequest, Body()]) -> Response:
    if "origin" in request.headers and not same_origin(request):
        raise errors.Problem(403, "cross-site-request", "A session is opened from the dashboard's own page.")
    state = request.app.state
    principal = await state.authenticator.principal("key", body.key)
    if principal is None:
        raise unauthorized("The key is unknown, revoked or expired.")
    async with state.database.write() as connection:
        token = await keys.open_session(connection, principal, state.settings.session_seconds)
    response = Response(status_code=204)
    response.set_cookie(
        COOKIE,
        token,
        max_age=int(state.settings.session_seconds),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.delete("/session", status_code=204, tags=["dashboard"])
async def close_session(
    request: Request, principal: Annotated[Principal | None, Depends(optional_principal)]
) -> Response:
    token = request.cookies.get(COOKIE)
    if token is not None:
        async with request.app.state.database.write() as connection:
            await keys.close_session(connection, token)
        request.app.state.authenticator.forget()
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response
