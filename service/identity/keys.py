"""API keys and dashboard sessions: created, hashed, looked up, rotated, revoked.

All functions here are plain async functions over the database.

A key is ``ek_<prefix>_<secret>`` with 192 random bits of secret, so a plain SHA-256 of it is enough (a dictionary
attack is impossible); the prefix finds the row and may be shown and logged. The previous secret of a rotated key stays
valid for a while, to leave clients time to switch.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.durable_files import write_file
from service.core import tables
from service.core.database import Database
from service.core.rows import KeyRow, all_rows, as_row, first_row
from service.core.settings import Settings
from service.core.tenants import DEFAULT_TENANT

SCOPES = ("jobs:read", "jobs:write", "features:read", "features:write", "admin")
FIRST_KEY_NAME = "admin"
KNOWN_KEYS_FILE = "known_keys.json"


@dataclasses.dataclass(frozen=True)
class Principal:
    """The sender of a request, and the tenant that the request is about.

    The scope ``admin`` allows everything. ``acting``: True for an operator who acts for a tenant and therefore sees
    only that tenant's data.
    """

    key_id: str
    name: str
    scopes: tuple[str, ...]
    expires_at: datetime.datetime | None = None
    tenant: str = DEFAULT_TENANT
    acting: bool = False

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    @property
    def is_operator(self) -> bool:
        """True for an operator's key: an admin key of the default tenant, even while it acts for another tenant."""
        return "admin" in self.scopes and (self.acting or self.tenant == DEFAULT_TENANT)

    @property
    def sees(self) -> str | None:
        """The tenant whose jobs and keys are visible; None for all tenants."""
        return None if self.is_operator and not self.acting else self.tenant


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _new_secret() -> tuple[str, str]:
    """Return (new key, its prefix)."""
    prefix = secrets.token_hex(4)
    return f"ek_{prefix}_{secrets.token_urlsafe(24)}", prefix


async def create(
    connection: AsyncConnection,
    name: str,
    scopes: Sequence[str],
    expires_at: datetime.datetime | None = None,
    tenant: str = DEFAULT_TENANT,
) -> tuple[str, KeyRow]:
    """Create a key; return (the key itself, which is shown once and not stored; its row)."""
    key, prefix = _new_secret()
    row: KeyRow = {
        "id": tables.new_id("key"),
        "tenant": tenant,
        "name": name,
        "prefix": prefix,
        "hash": digest(key),
        "scopes": list(scopes),
        "created_at": tables.now(),
        "expires_at": expires_at,
        "revoked_at": None,
        "rotated_at": None,
        "old_prefix": None,
        "old_hash": None,
        "old_until": None,
    }
    await connection.execute(tables.api_key.insert().values(row))
    return key, row


async def get(connection: AsyncConnection, key_id: str, tenant: str | None = None) -> KeyRow | None:
    """Return a key's row, locked until the transaction ends, or None; ``tenant`` None allows any tenant."""
    query = sa.select(tables.api_key).where(tables.api_key.c.id == key_id).with_for_update()
    if tenant is not None:
        query = query.where(tables.api_key.c.tenant == tenant)
    return await first_row(connection, KeyRow, query)


async def rotate(connection: AsyncConnection, row: KeyRow, overlap: datetime.timedelta) -> tuple[str, KeyRow]:
    """Give a live key a new secret; return the key itself and its row.

    The previous secret stays valid for ``overlap``; an even older secret becomes invalid. If ``overlap`` is zero, the
    key's sessions end too.
    """
    key, prefix = _new_secret()
    now = tables.now()
    old: dict[str, Any] = {"old_prefix": row["prefix"], "old_hash": row["hash"], "old_until": now + overlap}
    if not overlap:
        old = dict.fromkeys(old)
        await connection.execute(tables.session.delete().where(tables.session.c.key_id == row["id"]))
    values = {"prefix": prefix, "hash": digest(key), **old, "rotated_at": now}
    await connection.execute(tables.api_key.update().where(tables.api_key.c.id == row["id"]).values(values))
    return key, as_row(KeyRow, {**row, **values})


def is_live(row: KeyRow) -> bool:
    """Return True if the key can be used now."""
    return row["revoked_at"] is None and (row["expires_at"] is None or row["expires_at"] > tables.now())


def tenants(tenant: str | None = None) -> sa.Select[Any]:
    """Return a query for ``name`` and ``num_keys`` (usable keys) of every tenant that had a key, or of ``tenant``."""
    key = tables.api_key.c
    live = sa.and_(key.revoked_at.is_(None), sa.or_(key.expires_at.is_(None), key.expires_at > tables.now()))
    query = sa.select(key.tenant.label("name"), sa.func.count(sa.case((live, 1))).label("num_keys"))
    if tenant is not None:
        query = query.where(key.tenant == tenant)
    counted = query.group_by(key.tenant).subquery()
    return sa.select(counted.c.name, counted.c.num_keys)


async def revoke(connection: AsyncConnection, key_id: str) -> bool:
    """Revoke a key and end its sessions; return True if the key exists. Revoking twice changes nothing."""
    known_id = await connection.scalar(sa.select(tables.api_key.c.id).where(tables.api_key.c.id == key_id))
    if known_id is None:
        return False
    live = sa.and_(tables.api_key.c.id == key_id, tables.api_key.c.revoked_at.is_(None))
    await connection.execute(tables.api_key.update().where(live).values(revoked_at=tables.now()))
    await connection.execute(tables.session.delete().where(tables.session.c.key_id == key_id))
    return True


async def find(connection: AsyncConnection, key: str) -> Principal | None:
    """Return the principal of a key if it is known, not revoked and not expired."""
    parts = key.split("_", 2)
    if len(parts) != 3 or parts[0] != "ek":
        return None
    table = tables.api_key
    either = sa.or_(table.c.prefix == parts[1], table.c.old_prefix == parts[1])
    key_digest = digest(key)
    for row in await all_rows(connection, KeyRow, sa.select(table).where(either)):
        if hmac.compare_digest(row["hash"], key_digest):
            return _principal(row)
        if row["old_hash"] is not None and hmac.compare_digest(row["old_hash"], key_digest):
            return _principal(row, row["old_until"])
    return None


async def live(connection: AsyncConnection, limit: int) -> dict[str, Principal]:
    """Return a mapping from the digest of each usable key, previous secrets included, to its principal.

    The result contains at most the ``limit`` newest keys, newest first.
    """
    key = tables.api_key
    usable = sa.and_(key.c.revoked_at.is_(None), sa.or_(key.c.expires_at.is_(None), key.c.expires_at > tables.now()))
    query = sa.select(key).where(usable).order_by(key.c.created_at.desc()).limit(limit)
    principals: dict[str, Principal] = {}
    for row in await all_rows(connection, KeyRow, query):
        for secret, until in ((row["hash"], None), (row["old_hash"], row["old_until"])):
            principal = None if secret is None else _principal(row, until)
            if secret is not None and principal is not None:
                principals[secret] = principal
    return principals


async def open_session(connection: AsyncConnection, principal: Principal, seconds: float) -> str:
    """Create a session and return the token for the dashboard's cookie; it is hashed in the database like a key."""
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
    row = await first_row(connection, KeyRow, sa.select(tables.api_key).select_from(joined).where(live))
    return None if row is None else _principal(row)


async def close_session(connection: AsyncConnection, token: str) -> None:
    await connection.execute(tables.session.delete().where(tables.session.c.hash == digest(token)))


def _principal(row: KeyRow, until: datetime.datetime | None = None) -> Principal | None:
    """Return the principal, or None if the key is not usable; ``until`` is the expiry of the secret sent, if any."""
    ends = min((at for at in (row["expires_at"], until) if at is not None), default=None)
    if row["revoked_at"] is not None or (ends is not None and ends <= tables.now()):
        return None
    return Principal(row["id"], row["name"], tuple(row["scopes"]), ends, row["tenant"])


async def create_first(database: Database, settings: Settings) -> str | None:
    """Create one admin key in an empty database, written to ``$EVENKEEL_HOME/admin.key``; otherwise return None.

    The file is written before the commit: a crash between the two leaves a file that the next start overwrites, never a
    key that nobody knows.
    """
    async with database.write() as connection:
        await database.exclusive(connection, "first key")
        if await connection.scalar(sa.select(sa.func.count()).select_from(tables.api_key)):
            return None
        key, _ = await create(connection, FIRST_KEY_NAME, ["admin"])
        write_admin_key(settings, key)
    return key


async def reset_admin(settings: Settings) -> str:
    """Revoke the keys named ``admin`` and write a new key to ``admin.key``.

    Users who can access the database but lost the key need this, with the service stopped or running.

    Raises:
        FileNotFoundError: There is no such SQLite file.
        SchemaError: This version of Evenkeel cannot read the database's schema.
    """
    database = Database(settings.database_url)
    try:
        await database.require_newest()  # a database created here would belong to no service
        async with database.write() as connection:
            old = await connection.scalars(
                sa.select(tables.api_key.c.id).where(
                    tables.api_key.c.name == FIRST_KEY_NAME, tables.api_key.c.tenant == DEFAULT_TENANT
                )
            )
            for key_id in old.all():
                await revoke(connection, key_id)
            key, _ = await create(connection, FIRST_KEY_NAME, ["admin"])
            write_admin_key(settings, key)
        return key
    finally:
        await database.stop()


def write_admin_key(settings: Settings, key: str) -> None:
    """Write ``admin.key`` atomically, readable only by its owner from the first byte on."""
    path = settings.admin_key_file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"{key}\n".encode(), mode=0o600)


class KnownKeys(NamedTuple):
    """Keys in a file, for a process that serves vectors and starts while the database is down.

    The file (0600) has the SHA-256, id, name, tenant, scopes and expiry of each key that the database had when it last
    answered. The file never holds a key itself: a key has 192 random bits, so its hash gives no access. ``principals``
    maps a key's digest to its principal. ``confirmed_at`` is the time at which the database confirmed them, in seconds
    since 1970.
    """

    principals: dict[str, Principal]
    confirmed_at: float


def load_known(path: Path) -> KnownKeys:
    """Return the file's content; without keys if it is missing or incomplete, so that the database is asked."""
    try:
        document = json.loads(path.read_text("utf-8"))
        principals = {row["hash"]: _known_principal(row) for row in document["keys"]}
        return KnownKeys(principals, float(document["confirmed_at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return KnownKeys({}, 0.0)


def save_known(path: Path, principals: Mapping[str, Principal], confirmed_at: float) -> None:
    """Replace the file of known keys atomically.

    Raises:
        OSError: The file cannot be written.
    """
    rows = [
        {
            "hash": digest,
            "key_id": principal.key_id,
            "name": principal.name,
            "tenant": principal.tenant,
            "scopes": principal.scopes,
            "expires_at": None if principal.expires_at is None else principal.expires_at.isoformat(),
        }
        for digest, principal in principals.items()
    ]
    write_file(path, json.dumps({"confirmed_at": confirmed_at, "keys": rows}).encode(), mode=0o600, durable=False)


def _known_principal(row: Mapping[str, str]) -> Principal:
    expires = row["expires_at"]
    at = None if expires is None else datetime.datetime.fromisoformat(expires)
    return Principal(row["key_id"], row["name"], tuple(row["scopes"]), at, row.get("tenant", DEFAULT_TENANT))
