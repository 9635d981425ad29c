"""Keys and the audit log, for admins."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import sqlalchemy as sa

from service.core import pagination, tables
from service.core.pagination import PageRequest
from service.core.rows import AuditRow, KeyRow
from service.identity import audit, keys
from service.web.request import DashboardRequest

NUM_KEYS = 100
NUM_ENTRIES = 30


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return the keys, without their secrets, and a page of the audit log."""
    sees = request.principal.sees
    query = sa.select(tables.api_key)
    if sees is not None:
        query = query.where(tables.api_key.c.tenant == sees)
    key = request.asked("key")
    async with request.state.database.read() as connection:
        page = await pagination.page(connection, KeyRow, query, tables.api_key.c.id, PageRequest(NUM_KEYS), _key)
        entries = await pagination.page(
            connection,
            AuditRow,
            audit.listing(sees, key, None, None),
            tables.audit.c.id,
            request.paging(NUM_ENTRIES),
            dict,
        )
    filters = {"key": key} if key else {}
    older = urlencode({**filters, "cursor": entries.next_cursor}) if entries.next_cursor else None
    return {
        "keys": page.items, "scopes": keys.SCOPES, "entries": entries.items, "key": key, "older": older,
        "is_first_page": request.asked("cursor") is None,
    }  # fmt: skip


def _key(row: KeyRow) -> dict[str, Any]:
    fields = ("id", "tenant", "name", "prefix", "scopes", "created_at", "expires_at", "revoked_at", "old_until")
    return {**{name: row[name] for name in fields}, "is_live": keys.is_live(row)}  # type: ignore[literal-required]
