"""Routes of the audit log, for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import AwareDatetime, BaseModel

from service.core import pagination, tables
from service.core.pagination import Page, Paging
from service.core.rows import AuditRow
from service.identity import audit
from service.identity.auth import Admin

router = APIRouter(prefix="/v1/audit", tags=["audit"])


class AuditEntry(BaseModel):
    """One request to change something, whether it succeeded or not.

    ``action``: method and route; ``object``: what was created or changed; ``status``: status of the response (with 403
    or 409 nothing was changed); ``address``: the address that sent the request.
    """

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
    admin: Admin,
    paging: Paging,
    key: Annotated[str | None, Query(description="Only entries of the key with this id.")] = None,
    since: tables.Instant | None = None,
    until: Annotated[tables.Instant | None, Query(description="Only entries before this time.")] = None,
) -> Page[AuditEntry]:
    """List audit log entries, newest first: of all tenants for an operator, otherwise of the admin's own tenant."""
    query = audit.listing(admin.sees, key, since, until)
    async with request.app.state.database.read() as connection:
        return await pagination.page(
            connection, AuditRow, query, tables.audit.c.id, paging, lambda row: AuditEntry(**row)
        )
