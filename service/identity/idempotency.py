"""``Idempotency-Key``: requests with the same key and body take effect once within 24 hours, even if sent in parallel.

A request whose work is one transaction claims its key in that transaction (:func:`take`): a parallel request waits for
it, and finds the work done. If the work needs more than one transaction, as a promotion does, a request reserves its
key in a transaction of its own. It then does its work, and completes the key in the transaction of the work. A
reservation whose request died is taken over after a minute; the previous holder can then no longer complete it. A
refused request frees its key.
"""

from __future__ import annotations

import asyncio
import datetime
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import sqlalchemy as sa
from fastapi import Header
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import tables
from service.core.database import Database, insert_new
from service.core.errors import Problem
from service.identity.keys import digest

KEPT = datetime.timedelta(hours=24)
IN_FLIGHT = datetime.timedelta(minutes=1)
MAX_LENGTH = 255


IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=MAX_LENGTH)]
"""Type of a route's parameter that receives the header."""
Result = TypeVar("Result")


class Reservation(NamedTuple):
    """An idempotency key that a request has reserved; who has ``token`` can complete or release it."""

    key_id: str
    key: str
    token: str


class Done(NamedTuple):
    """Result of an earlier request with the key: the job that it created or changed, or else the response."""

    job_id: str | None
    answer: dict[str, Any] | None


def _at(key_id: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.idempotency.c.key_id == key_id, tables.idempotency.c.key == key)


async def once(
    database: Database, key_id: str, key: str | None, body: str, act: Callable[[Reservation | None], Awaitable[Result]]
) -> Result | Done:
    """Return the result of ``act``, or the result (:class:`Done`) of an earlier request with the key.

    ``body``: text that identifies the request and its object. ``act`` does the work and completes the reservation that
    it receives. Without a ``key`` it receives None.

    Raises the same errors as :func:`take`.
    """
    if key is None:
        return await act(None)
    reserved = await reserve(database, key_id, key, body)
    if isinstance(reserved, Done):
        return reserved
    try:
        return await act(reserved)
    except BaseException:
        await asyncio.shield(release(database, reserved))
        raise


async def reserve(database: Database, key_id: str, key: str, body: str) -> Reservation | Done:
    """Reserve the key in a transaction of its own, or return the result of an earlier request with the key."""
    async with database.write() as connection:
        return await take(connection, key_id, key, body)


async def take(
    connection: AsyncConnection, key_id: str, key: str, body: str, job_id: str | None = None
) -> Reservation | Done:
    """Claim the key until the transaction ends; a parallel request waits for that end.

    ``job_id``: the job that this transaction creates; if given, the key is completed at once.

    Raises:
        Problem: 422 if the key was used for another body, 409 if its first request is still in progress.
    """
    if not 1 <= len(key) <= MAX_LENGTH:
        raise Problem(422, "invalid-request", f"Idempotency-Key must have 1 to {MAX_LENGTH} characters.")
    table = tables.idempotency
    now = tables.now()
    fresh: dict[str, Any] = {"body_hash": digest(body), "token": secrets.token_hex(16), "created_at": now}
    row = {"key_id": key_id, "key": key, "job_id": job_id, **fresh}
    fresh |= {"job_id": job_id, "answer": sa.null()}
    new = insert_new(connection.dialect.name, table, table.c.token)
    while (await connection.execute(new, row)).first() is None:
        done = await done_before(connection, key_id, key, body)
        if done is not None:
            return done
        overtaken = table.update().where(_at(key_id, key)).values(fresh)
        if (await connection.execute(overtaken)).rowcount:
            break  # otherwise the key was freed between the two statements: try again
    return Reservation(key_id, key, str(fresh["token"]))


async def done_before(connection: AsyncConnection, key_id: str, key: str, body: str) -> Done | None:
    """Return the result of an earlier request with the key, or None; raises the same errors as :func:`take`."""
    table, now = tables.idempotency, tables.now()
    row = (await connection.execute(sa.select(table).where(_at(key_id, key)).with_for_update())).first()
    if row is None or row.created_at <= now - KEPT:
        return None
    if row.body_hash != digest(body):
        detail = "This Idempotency-Key was used with another body. Use a new key for a new request."
        raise Problem(422, "idempotency-key-reused", detail)
    if row.job_id is not None or row.answer is not None:
        return Done(row.job_id, row.answer)
    if row.created_at > now - IN_FLIGHT:
        detail = "The first request with this Idempotency-Key is still in flight. Try again in a moment."
        raise Problem(409, "request-in-flight", detail, headers={"Retry-After": "1"})
    return None


async def complete(
    connection: AsyncConnection,
    reservation: Reservation | None,
    *,
    job_id: str | None = None,
    answer: dict[str, Any] | None = None,
) -> None:
    """Complete the key in the transaction of the work; does nothing for a request without a key.

    Give either ``job_id``, the job that was created or changed, or ``answer``, the response as JSON.

    Raises:
        Problem: 409 if another request has taken over the key.
    """
    if reservation is None:
        return
    table = tables.idempotency
    own_row = sa.and_(_at(reservation.key_id, reservation.key), table.c.token == reservation.token)
    values = {"job_id": job_id, "answer": sa.null() if answer is None else answer}
    done = await connection.execute(table.update().where(own_row).values(values))
    if done.rowcount != 1:
        raise Problem(409, "request-in-flight", "Another request with this Idempotency-Key took over. Send it again.")


async def release(database: Database, reservation: Reservation) -> None:
    """Free the key after a failed request, so that a corrected request may use it."""
    table = tables.idempotency
    undone = sa.and_(table.c.job_id.is_(None), table.c.answer.is_(None))
    own_row = sa.and_(_at(reservation.key_id, reservation.key), table.c.token == reservation.token, undone)
    async with database.write() as connection:
        await connection.execute(table.delete().where(own_row))
