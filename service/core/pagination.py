"""Lists in pages: ``{"items", "next_cursor"}``, newest first, stable while rows are added."""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import errors
from trainer.spec.problems import FieldProblem

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """``next_cursor`` is null on the last page; pass it back as ``cursor`` for the next."""

    items: list[Item]
    next_cursor: str | None = None


async def newest_first(
    connection: AsyncConnection, query: sa.Select[Any], key: sa.ColumnElement[Any], limit: int, cursor: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return one page in descending order of ``key`` (ids sort by creation), and the cursor of the next page.

    ``key`` is a string column.
    """
    return await _page(connection, query, key, limit, cursor, descending=True)


async def by_name(
    connection: AsyncConnection, query: sa.Select[Any], key: sa.ColumnElement[Any], limit: int, cursor: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return one page in ascending order of ``key``, and the cursor of the next page."""
    return await _page(connection, query, key, limit, cursor, descending=False)


async def newest_instants(
    connection: AsyncConnection, query: sa.Select[Any], key: sa.ColumnElement[Any], limit: int, cursor: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return one page in descending order of ``key``, a column of times, and the cursor of the next page."""
    return await _page(connection, query, key, limit, cursor, descending=True, read=_instant)


async def _page(
    connection: AsyncConnection,
    query: sa.Select[Any],
    key: Any,
    limit: int,
    cursor: str | None,
    *,
    descending: bool,
    read: Callable[[str], Any] = str,
) -> tuple[list[dict[str, Any]], str | None]:
    if cursor is not None:
        last = decode(cursor, read)
        query = query.where(key < last if descending else key > last)
    query = query.order_by(key.desc() if descending else key).limit(limit + 1)
    rows = [dict(row) for row in (await connection.execute(query)).mappings()]
    following = encode(str(rows[limit - 1][key.name])) if len(rows) > limit else None
    return rows[:limit], following


def _instant(text: str) -> datetime.datetime:
    """Parse a time; raise ValueError if it is not one, or has no zone."""
    at = datetime.datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(text)
    return at.astimezone(datetime.UTC)


def encode(value: str) -> str:
    return base64.urlsafe_b64encode(value.encode()).decode().rstrip("=")


def decode(cursor: str, read: Callable[[str], Any] = str) -> Any:
    """Return the value of a cursor.

    Args:
        cursor: What the client sent.
        read: Parses the decoded text; its ValueError means that the cursor is invalid.

    Raises:
        Problem: 422 for a cursor that was not issued here.
    """
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode()
        if not text.isprintable():
            raise ValueError(text)
        return read(text)
    except (binascii.Error, ValueError, OverflowError):
        raise errors.invalid(
            FieldProblem("cursor", "is not one that this list gave", "leave it out for the first page")
        ) from None
