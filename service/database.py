"""One database, SQLite or PostgreSQL, behind two context managers: :meth:`Database.read` and :meth:`Database.write`.

SQLAlchemy's defaults on SQLite lose updates: the driver opens transactions lazily and deferred, so two writers read the
same row before either writes. Here the driver opens none (``isolation_level=None``) and a write begins with BEGIN
IMMEDIATE: it holds the write lock before it reads. On PostgreSQL a read that will be written back takes the row lock
(``with_for_update()``, which SQLite ignores).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.util import await_only

BUSY_TIMEOUT_SECONDS = 30
MIGRATIONS = Path(__file__).parent / "migrations"
DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
}
"""Each kind of database has one driver here: a URL may leave it out."""
_WRITE = "evenkeel_write"


class Database:
    """Connections to ``url``: ``sqlite+aiosqlite:///FILE`` or ``postgresql+asyncpg://...`` (``?search_path=`` allowed).

    Every write is one transaction: committed when the block ends, rolled back when it raises.
    """

    def __init__(self, url: str):
        parsed = sa.make_url(url)
        parsed = parsed.set(drivername=DRIVERS.get(parsed.drivername, parsed.drivername))
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        arguments: dict[str, Any] = {}
        if self.is_sqlite:
            arguments = {"isolation_level": None, "timeout": BUSY_TIMEOUT_SECONDS}
        elif "search_path" in parsed.query:
            arguments = {"server_settings": {"search_path": str(parsed.query["search_path"])}}
            parsed = parsed.difference_update_query(["search_path"])
        self.url = parsed
        # Errors are logged: without the values, which may be large or secret.
        self.engine = create_async_engine(
            parsed, connect_args=arguments, pool_pre_ping=not self.is_sqlite, hide_parameters=True
        )
        # Within one process writers queue here; SQLite's own busy handler sleeps and is not fair.
        self._writers: asyncio.Lock | nullcontext[None] = asyncio.Lock() if self.is_sqlite else nullcontext()
        if self.is_sqlite:
            event.listen(self.engine.sync_engine, "connect", _set_pragmas)
            event.listen(self.engine.sync_engine, "begin", _begin)

    async def start(self) -> None:
        """Creates the SQLite file's directory and brings the schema to the newest version, one process at a time."""
        if self.is_sqlite and self.url.database and self.url.database != ":memory:":
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
            # Hashes of keys are in it. SQLite gives its companion files the same mode. A file that is there is not
            # opened: to close it would drop the locks that this process's other connections hold on it.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.url.database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        async with self.write() as connection:
            await self.exclusive(connection, "migrations")
            await connection.run_sync(migrate, "head")

    async def stop(self) -> None:
        await self.engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection that sees one snapshot (SQLite) and writes nothing."""
        async with self.engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """One read-modify-write transaction."""
        async with self._writers, self.engine.connect() as connection:
            await connection.execution_options(**{_WRITE: True})
            async with connection.begin():
                yield connection

    async def exclusive(self, connection: AsyncConnection, name: str) -> None:
        """Until this transaction ends, no other process passes the same point. A SQLite write has that already."""
        if not self.is_sqlite:
            number = int.from_bytes(hashlib.sha256(f"evenkeel {name}".encode()).digest()[:8], "big", signed=True)
            await connection.execute(sa.text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})


def migrate(connection: sa.Connection, revision: str) -> None:
    """Upgrades (or, to an older revision, downgrades) within the connection's transaction."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    current = MigrationContext.configure(connection).get_current_revision()
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if current is not None and current not in known:
        raise RuntimeError(
            f"the database is at revision {current}, which this version of Evenkeel does not know: "
            "it was written by a newer one; install that, or restore a backup made before"
        )
    target = known[0] if revision == "head" else revision
    if current == target:
        return
    if target == "base" or (current in known and target in known and known.index(target) > known.index(current)):
        command.downgrade(config, target)
    else:
        command.upgrade(config, target)


def _set_pragmas(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            # Of connections that make this change to a new file at once, SQLite refuses some without waiting.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            await_only(asyncio.sleep(0.01))
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITE) else "BEGIN")
