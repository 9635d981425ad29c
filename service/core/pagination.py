"""Lists in pages: ``{"items", "next_cursor"}``, newest first, stable while rows are added."""

from __future__ import annotations

import datetime
import re
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

TEXT_CURSOR = r"^([2-6][0-9a-f]|7[0-9a-e])+$"
"""Pattern of the cursor of a list ordered by a name or id: the hexadecimal bytes of printable ASCII."""
TIME_CURSOR = r"^(3[0-9]){1,16}$"
"""Pattern of the cursor of a list ordered by a time: the hexadecimal bytes of a number of microseconds since 1970."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


class Page(BaseModel, Generic[Item]):
    """A page of a list. ``next_cursor``, sent as ``cursor``, requests the next page; it is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


class PageRequest(NamedTuple):
    """A request for a page: the largest number of items, and the cursor of the previous page (None: first page)."""

    limit: int
    cursor: str | None = None


Limit = Annotated[int, Query(ge=1, le=200)]


# decode() refuses other cursors, with a better message than FastAPI's.
def _by_text(
    limit: Limit = 50, cursor: Annotated[str | None, Query(json_schema_extra={"pattern": TEXT_CURSOR})] = None
) -> PageRequest:
    return PageRequest(limit, cursor)


def _by_time(
    limit: Limit = 50, cursor: Annotated[str | None, Query(json_schema_extra={"pattern": TIME_CURSOR})] = None
) -> PageRequest:
    return PageRequest(limit, cursor)


Paging = Annotated[PageRequest, Depends(_by_text)]
PagingByTime = Annotated[PageRequest, Depends(_by_time)]


async def page(
    connection: AsyncConnection,
    kind: type[Row],
    query: sa.Select[Any],
    key: sa.ColumnElement[Any],
    paging: PageRequest,
    view: Callable[[Row], Item],
    *,
    descending: bool = True,
    by_time: bool = False,
) -> Page[Item]:
    """Return one page of a query.

    ``key`` is the column that orders the list, and must have no duplicates; ids sort by time of creation. ``view``
    converts a row to an item of the page. ``by_time``: ``key`` is a time.
    """
    if paging.cursor is not None:
        last = decode_time(paging.cursor) if by_time else decode(paging.cursor)
        query = query.where(key < last if descending else key > last)
    query = query.order_by(key.desc() if descending else key).limit(paging.limit + 1)
    rows = (await connection.execute(query)).mappings().all()
    following = encode(rows[paging.limit - 1][key]) if len(rows) > paging.limit else None
    return Page(items=[view(as_row(kind, row)) for row in rows[: paging.limit]], next_cursor=following)


def page_of(items: list[dict[str, Any]], paging: PageRequest, key: str, *, descending: bool = False) -> dict[str, Any]:
    """Return one page of a list that is entirely in memory, ordered by the field ``key``."""
    if paging.cursor is not None:
        last = decode(paging.cursor)
        items = [item for item in items if (item[key] < last if descending else item[key] > last)]
    following = encode(items[paging.limit - 1][key]) if len(items) > paging.limit else None
    return {"items": items[: paging.limit], "next_cursor": following}


def encode(value: str | datetime.datetime) -> str:
    """Return the cursor of the page that follows ``value``."""
    if isinstance(value, datetime.datetime):
        value = str((value - _EPOCH) // _MICROSECOND)
    return value.encode().hex()


def decode(cursor: str, pattern: str = TEXT_CURSOR) -> str:
    """Return the text of a cursor.

    Raises:
        Problem: 422 for a cursor that this list did not issue.
    """
    if not re.fullmatch(pattern, cursor):
        raise errors.invalid(FieldProblem("cursor", "is not a cursor of this list", "leave it out for the first page"))
    return bytes.fromhex(cursor).decode("ascii")


def decode_time(cursor: str) -> datetime.datetime:
    """Return the time of a cursor; raise Problem as :func:`decode` does."""
    return _EPOCH + int(decode(cursor, TIME_CURSOR)) * _MICROSECOND
