"""``Idempotency-Key``: the same key and body within 24 hours is the same job, however often it is sent, also at once.

A request reserves its key in a transaction of its own, does its work, and completes the key in the transaction that
creates the job. A reservation whose request died is overtaken after a minute; the overtaken one can no longer complete.
"""

from __future__ import annotations

import datetime
import secrets
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from service import tables
from service.database import Database
from service.errors import Problem
from service.keys import digest

KEPT = datetime.timedelta(hours=24)
IN_FLIGHT = datetime.timedelta(minutes=1)
MAX_LENGTH = 255


class Reservation(NamedTuple):
    """``job_id``: the job that this key made already; else null, and ``token`` completes or releases the key."""

    key_id: str
    key: str
    token: str
    job_id: str | None


def _at(key_id: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.idempotency.c.key_id == key_id, tables.idempotency.c.key == key)


async def reserve(database: Database, key_id: str, key: str, body: str) -> Reservation:
    """Raises 422 where the key was used for another body, 409 where its first request is still in flight."""
    if not 1 <= len(key) <= MAX_LENGTH:
        raise Problem(422, "invalid-request", f"Idempotency-Key has 1 to {MAX_LENGTH} characters.")
    table = tables.idempotency
    now = tables.now()
    fresh = {"body_hash": digest(body), "token": secrets.token_hex(16), "job_id": None, "created_at": now}
    async with database.write() as connection:
        await database.exclusive(connection, f"idempotency {key_id} {key}")
        await connection.execute(table.delete().where(table.c.created_at < now - KEPT))
        row = (await connection.execute(sa.select(table).where(_at(key_id, key)))).first()
        if row is None:
            await connection.execute(table.insert().values(key_id=key_id, key=key, **fresh))
        elif row.body_hash != fresh["body_hash"]:
            detail = "This Idempotency-Key was used with another body. Use a new key for a new request."
            raise Problem(422, "idempotency-key-reused", detail)
        elif row.job_id is not None:
            return Reservation(key_id, key, row.token, row.job_id)
        elif row.created_at > now - IN_FLIGHT:
            detail = "The first request with this Idempotency-Key is still in flight. Try again in a moment."
            raise Problem(409, "request-in-flight", detail, headers={"Retry-After": "1"})
        else:
            await connection.execute(table.update().where(_at(key_id, key)).values(fresh))
    return Reservation(key_id, key, str(fresh["token"]), None)


async def complete(connection: AsyncConnection, reservation: Reservation, job_id: str) -> None:
    """In the transaction that creates the job. Raises 409 where another request has overtaken this one."""
    table = tables.idempotency
    mine = sa.and_(_at(reservation.key_id, reservation.key), table.c.token == reservation.token)
    done = await connection.execute(table.update().where(mine).values(job_id=job_id))
    if done.rowcount != 1:
        raise Problem(409, "request-in-flight", "Another request with this Idempotency-Key took over. Send it again.")


async def release(database: Database, reservation: Reservation) -> None:
    """After a failed request, so that a corrected one may use the key."""
    table = tables.idempotency
    mine = sa.and_(
        _at(reservation.key_id, reservation.key), table.c.token == reservation.token, table.c.job_id.is_(None)
    )
    async with database.write() as connection:
        await connection.execute(table.delete().where(mine, table.c.job_id.is_(None)))
