"""API keys and dashboard sessions: created, hashed, looked up, revoked. Plain async functions over the database.

A key is ``ek_<prefix>_<secret>`` with 192 random bits of secret, so a plain SHA-256 of it is enough (no dictionary to
try); the prefix finds the row and may be shown and logged.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from service import tables
from service.database import Database
from service.settings import Settings

SCOPES = ("jobs:read", "jobs:write", "features:read", "features:write", "admin")
FIRST_KEY_NAME = "admin"


@dataclasses.dataclass(frozen=True)
class Principal:
    """Who a request comes from. ``admin`` allows everything."""

    key_id: str
    name: str
    scopes: tuple[str, ...]
    expires_at: datetime.datetime | None = None

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


async def create(
    connection: AsyncConnection, name: str, scopes: Sequence[str], expires_at: datetime.datetime | None = None
) -> tuple[str, dict[str, Any]]:
    """A new key: (the key itself, shown once and not kept; its row)."""
    prefix = secrets.token_hex(4)
    key = f"ek_{prefix}_{secrets.token_urlsafe(24)}"
    row = {
        "id": tables.new_id("key"),
        "name": name,
        "prefix": prefix,
        "hash": digest(key),
        "scopes": list(scopes),
        "created_at": tables.now(),
        "expires_at": expires_at,
        "revoked_at": None,
    }
    await connection.execute(tables.api_key.insert().values(row))
    return key, row


async def revoke(connection: AsyncConnection, key_id: str) -> bool:
    """Whether there is such a key. Its sessions end with it; revoking twice changes nothing."""
    found = await connection.scalar(sa.select(tables.api_key.c.id).where(tables.api_key.c.id == key_id))
    if found is None:
        return False
    live = sa.and_(tables.api_key.c.id == key_id, tables.api_key.c.revoked_at.is_(None))
    await connection.execute(tables.api_key.update().where(live).values(revoked_at=tables.now()))
    await connection.execute(tables.session.delete().where(tables.session.c.key_id == key_id))
    return True


async def find(connection: AsyncConnection, key: str) -> Principal | None:
    """The principal of a key, if it is ours, not revoked and not expired."""
    parts = key.split("_", 2)
    if len(parts) != 3 or parts[0] != "ek":
        return None
    row = (await connection.execute(sa.select(tables.api_key).where(tables.api_key.c.prefix == parts[1]))).first()
    if row is None or not hmac.compare_digest(row.hash, digest(key)):
        return None
    return _principal(row)


async def live(connection: AsyncConnection, limit: int) -> dict[str, Principal]:
    """The keys that may be used now, newest first, by their digests; ``limit`` at most."""
    key = tables.api_key
    usable = sa.and_(key.c.revoked_at.is_(None), sa.or_(key.c.expires_at.is_(None), key.c.expires_at > tables.now()))
    rows = await connection.execute(sa.select(key).where(usable).order_by(key.c.created_at.desc()).limit(limit))
    found = ((row.hash, _principal(row)) for row in rows)
    return {digest: principal for digest, principal in found if principal is not None}


async def open_session(connection: AsyncConnection, principal: Principal, seconds: float) -> str:
    """A session token for the dashboard's cookie; hashed in the database like a key."""
    token = secrets.token_urlsafe(32)
    now = tables.now()
    await connection.execute(tables.session.delete().where(tables.session.c.expires_at < now))
    row = {
        "hash": digest(token),
        "key_id": principal.key_id,
        "created_at": now,
        "expires_at": now + datetime.timedelta(seconds=seconds),
    }
    await connection.execute(tables.session.insert().values(row))
    return token


async def find_session(connection: AsyncConnection, token: str) -> Principal | None:
    joined = tables.session.join(tables.api_key, tables.session.c.key_id == tables.api_key.c.id)
    live = sa.and_(tables.session.c.hash == digest(token), tables.session.c.expires_at > tables.now())
    row = (await connection.execute(sa.select(tables.api_key).select_from(joined).where(live))).first()
    return None if row is None else _principal(row)


async def close_session(connection: AsyncConnection, token: str) -> None:
    await connection.execute(tables.session.delete().where(tables.session.c.hash == digest(token)))


def _principal(row: Any) -> Principal | None:
    if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= tables.now()):
        return None
    return Principal(row.id, row.name, tuple(row.scopes), row.expires_at)


async def create_first(database: Database, settings: Settings) -> str | None:
    """On an empty database: one admin key, written to ``$EVENKEEL_HOME/admin.key``. Else None.

    The file is written before the commit: a crash between the two leaves a file that the next start overwrites, never
    a key that nobody knows.
    """
    async with database.write() as connection:
        await database.exclusive(connection, "first key")
        if await connection.scalar(sa.select(sa.func.count()).select_from(tables.api_key)):
            return None
        key, _ = await create(connection, FIRST_KEY_NAME, ["admin"])
        write_admin_key(settings, key)
    return key


async def reset_admin(settings: Settings) -> str:
    """Revokes the keys named ``admin`` and writes a new one to ``admin.key``: for whoever can read the database but
    lost the key. Works with the service stopped or running."""
    database = Database(settings.database_url)
    try:
        await database.start()
        async with database.write() as connection:
            old = await connection.scalars(
                sa.select(tables.api_key.c.id).where(tables.api_key.c.name == FIRST_KEY_NAME)
            )
            for key_id in old.all():
                await revoke(connection, key_id)
            key, _ = await create(connection, FIRST_KEY_NAME, ["admin"])
            write_admin_key(settings, key)
        return key
    finally:
        await database.stop()


def write_admin_key(settings: Settings, key: str) -> None:
    """Atomically, readable by the owner alone from the first byte on."""
    path = settings.admin_key_file
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".admin.key.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
