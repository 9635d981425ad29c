"""Lists in pages: ``{"items", "next_cursor"}``, newest first, stable while rows are added."""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Callable
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa
from fastapi import Depends, Query
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import errors
from service.core.rows import Row, as_row
from trainer.spec.problems import FieldProblem

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """A page of a list. ``next_cursor``, sent as ``cursor``, requests the next page; it is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


class PageRequest(NamedTuple):
    """A request for a page: the largest number of items, and the cursor of the previous page (None: first page)."""

    limit: int
    cursor: str | None = None


def _asked_for(
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(json_schema_extra={"pattern": "^[A-Za-z0-9_-]+$"})] = None,
) -> PageRequest:
    return PageRequest(limit, cursor)


Paging = Annotated[PageRequest, Depends(_asked_for)]


async def page(
    connection: AsyncConnection,
    kind: type[Row],
    query: sa.Select[Any],
    key: sa.ColumnElement[Any],
    paging: PageRequest,
    view: Callable[[Row], Item],
    *,
    descending: bool = True,
    read: Callable[[str], Any] = str,
) -> Page[Item]:
    """Return one page of a query.

    ``key`` is the column that orders the list, and must have no duplicates; ids sort by time of creation. ``view``
    converts a row to an item of the page; ``read`` parses a cursor's text to a value of ``key``.
    """
    if paging.cursor is not None:
        last = decode(paging.cursor, read)
        query = query.where(key < last if descending else key > last)
    query = query.order_by(key.desc() if descending else key).limit(paging.limit + 1)
    rows = (await connection.execute(query)).mappings().all()
    following = encode(str(rows[paging.limit - 1][key])) if len(rows) > paging.limit else None
    return Page(items=[view(as_row(kind, row)) for row in rows[: paging.limit]], next_cursor=following)


def whole_row(row: Row) -> Row:
    """Return the row unchanged; serves as ``view`` for a page whose items are the rows."""
    return row


def page_of(items: list[dict[str, Any]], paging: PageRequest, key: str, *, descending: bool = False) -> dict[str, Any]:
    """Return one page of a list that is entirely in memory, ordered by the field ``key``."""
    if paging.cursor is not None:
        last = decode(paging.cursor)
        items = [item for item in items if (item[key] < last if descending else item[key] > last)]
    following = encode(items[paging.limit - 1][key]) if len(items) > paging.limit else None
    return {"items": items[: paging.limit], "next_cursor": following}


def instant(text: str) -> datetime.datetime:
    """Parse a time; raise ValueError if it is not one, or has no zone."""
    at = datetime.datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(text)
    return at.astimezone(datetime.UTC)


def encode(value: str) -> str:
    return base64.urlsafe_b64encode(value.encode()).decode().rstrip("=")


def decode(cursor: str, read: Callable[[str], Any] = str) -> Any:
    """Return the value of a cursor.

    ``read`` parses the decoded text; its ValueError means that the cursor is invalid.

    Raises:
        Problem: 422 for a cursor that this service did not issue.
    """
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode()
        if not text.isprintable():
            raise ValueError(text)
        return read(text)
    except (binascii.Error, ValueError, OverflowError):
        raise errors.invalid(
            FieldProblem("cursor", "is not a cursor of this list", "leave it out for the first page")
        ) from None
