"""Routes for API keys and tenants, and to exchange a key for the dashboard's session cookie."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Body, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.api.middleware import too_often
from service.core import errors, pagination, tables
from service.core.pagination import Page, Paging
from service.core.rows import KeyRow
from service.identity import keys
from service.identity.auth import (
    COOKIE,
    KEY_IS_OPTIONAL,
    Admin,
    address_of,
    optional_principal,
    same_origin,
    unauthorized,
)
from service.identity.keys import Principal
from trainer.spec import Name
from trainer.spec.problems import FieldProblem

router = APIRouter(tags=["keys"])


class KeyRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    scopes: list[Literal["jobs:read", "jobs:write", "features:read", "features:write", "admin"]] = Field(min_length=1)
    expires_at: tables.Instant | None = None


class Rotation(BaseModel):
    """Lifetime of the previous secret after a rotation; 0 revokes it at once, together with the key's sessions."""

    model_config = ConfigDict(extra="forbid")

    overlap_seconds: float = Field(default=24 * 3600, ge=0, le=90 * 24 * 3600, allow_inf_nan=False)


class KeyView(BaseModel):
    """A key without its secret. ``old_until``: end of validity of the secret before the last rotation."""

    id: str
    tenant: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: datetime.datetime
    expires_at: datetime.datetime | None
    revoked_at: datetime.datetime | None
    rotated_at: datetime.datetime | None
    old_until: datetime.datetime | None


class NewKey(KeyView):
    key: str = Field(description="The key's secret. It is shown only this once: the service stores a hash of it.")


class Tenant(BaseModel):
    """A tenant, and the number of its usable keys."""

    name: str
    num_keys: int


class SessionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: str = Field(min_length=1, max_length=512)


@router.post("/v1/keys", status_code=201)
async def create(request: Request, response: Response, body: KeyRequest, admin: Admin) -> NewKey:
    """Create a key in the admin's own tenant, or in the tenant that an operator acts for."""
    if body.expires_at is not None and body.expires_at <= tables.now():
        raise errors.invalid(
            FieldProblem("expires_at", "lies in the past", "give a time in the future, or leave the field out")
        )
    async with request.app.state.database.write() as connection:
        key, row = await keys.create(
            connection, body.name, list(dict.fromkeys(body.scopes)), body.expires_at, admin.tenant
        )
    response.headers["Location"] = f"/v1/keys/{row['id']}"
    return NewKey.model_validate({**row, "key": key})


@router.get("/v1/keys")
async def list_keys(request: Request, admin: Admin, paging: Paging) -> Page[KeyView]:
    query = sa.select(tables.api_key)
    if admin.sees is not None:
        query = query.where(tables.api_key.c.tenant == admin.sees)
    async with request.app.state.database.read() as connection:
        return await pagination.page(connection, KeyRow, query, tables.api_key.c.id, paging, KeyView.model_validate)


@router.post("/v1/keys/{key_id}/rotate", responses=errors.responses(404, 409))
async def rotate(request: Request, key_id: str, admin: Admin, body: Rotation | None = None) -> NewKey:
    """Give a key a new secret; the previous one stays valid for `overlap_seconds` (default: a day).

    Clients thus have time to switch. Id, scopes and expiry stay the same. 409 for a key that is revoked or has expired.
    """
    overlap = datetime.timedelta(seconds=(body or Rotation()).overlap_seconds)
    async with request.app.state.database.write() as connection:
        row = await keys.get(connection, key_id, admin.sees)
        if row is None:
            raise errors.not_found("key", key_id)
        if not keys.is_live(row):
            raise errors.Problem(409, "key-ended", f"Key {key_id} is revoked or has expired: create a new key.")
        key, row = await keys.rotate(connection, row, overlap)
    request.app.state.authenticator.forget()
    return NewKey.model_validate({**row, "key": key})


@router.delete("/v1/keys/{key_id}", status_code=204, responses=errors.responses(404))
async def revoke(request: Request, key_id: str, admin: Admin) -> None:
    async with request.app.state.database.write() as connection:
        if await keys.get(connection, key_id, admin.sees) is None:
            raise errors.not_found("key", key_id)
        await keys.revoke(connection, key_id)
    request.app.state.authenticator.forget()


@router.get("/v1/tenants")
async def list_tenants(request: Request, admin: Admin, paging: Paging) -> Page[Tenant]:
    """List tenants, sorted by name: all for an operator, else the admin's own. A tenant begins with its first key."""
    query = keys.tenants(admin.sees)
    async with request.app.state.database.read() as connection:
        by = query.selected_columns.name
        return await pagination.page(
            connection, dict[str, Any], query, by, paging, lambda row: Tenant(**row), descending=False
        )


@router.post("/session", status_code=204, tags=["dashboard"])
async def open_session(request: Request, body: Annotated[SessionRequest, Body()]) -> Response:
    if "origin" in request.headers and not same_origin(request):
        raise errors.Problem(403, "cross-site-request", "Only the dashboard's own page may open a session.")
    state = request.app.state
    principal = await state.authenticator.principal("key", body.key, address_of(request))
    if principal is None:
        raise unauthorized("The key is unknown, revoked or expired.")
    # The middleware could not check this, because the key is in the body.
    problem = too_often(state.rate, principal, state.settings)
    if problem is not None:
        raise problem
    request.state.audited = principal
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


@router.delete("/session", status_code=204, tags=["dashboard"], openapi_extra=KEY_IS_OPTIONAL)
async def close_session(
    request: Request, principal: Annotated[Principal | None, Depends(optional_principal)]
) -> Response:
    token = request.cookies.get(COOKIE)
    if token is not None:
        request.state.audited = principal
        async with request.app.state.database.write() as connection:
            await keys.close_session(connection, token)
        request.app.state.authenticator.forget()
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response
