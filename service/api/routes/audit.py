"""The audit log, for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AwareDatetime, BaseModel

from service.core import pagination, tables
from service.core.pagination import Page
from service.identity import audit
from service.identity.auth import require
from service.identity.keys import Principal

router = APIRouter(prefix="/v1/audit", tags=["audit"])


class AuditEntry(BaseModel):
    """One request that was to change something. ``action``: method and route; ``object``: what was made or changed;
    ``status``: of the answer, so 403 and 409 changed nothing; ``address``: whence it came."""

    id: str
    at: AwareDatetime
    tenant: str
    key_id: str
    key_name: str
    action: str
    object: str
    status: int
    address: str


@router.get("")
async def list_entries(
    request: Request,
    admin: Annotated[Principal, Depends(require("admin"))],
    key: Annotated[str | None, Query(description="Id of a key.")] = None,
    since: tables.Instant | None = None,
    until: Annotated[tables.Instant | None, Query(description="Before this.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: str | None = None,
) -> Page[AuditEntry]:
    """Newest first; of all tenants for an operator, of an admin's own else."""
    query = audit.listing(admin.sees, key, since, until)
    async with request.app.state.database.read() as connection:
        rows, following = await pagination.newest_first(connection, query, tables.audit.c.id, limit, cursor)
    return Page(items=[AuditEntry(**row) for row in rows], next_cursor=following)
