"""One database, SQLite or PostgreSQL, behind two context managers: :meth:`Database.read` and :meth:`Database.write`.

SQLAlchemy's defaults on SQLite lose updates: the driver opens transactions lazily and deferred, so two writers may read
the same row before either writes. Here the driver opens no transactions (``isolation_level=None``), and a write begins
with BEGIN IMMEDIATE, which takes the write lock before anything is read. On PostgreSQL, reading a row that will be
written back takes the row's lock (``with_for_update()``, which SQLite ignores).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.util import await_only

BUSY_TIMEOUT_SECONDS = 30
NUM_CONNECTIONS = 15
"""Most connections of a process to a database server; opening one costs as much as twenty statements."""
PING_AFTER_SECONDS = 1.0
"""Idle time after which a connection is tested before use, because the server may have been replaced meanwhile."""
MIGRATIONS = Path(__file__).parent / "migrations"
DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgres": "postgresql+asyncpg", "postgresql": "postgresql+asyncpg"}
"""Map from the scheme of a database URL to the scheme with the driver."""
_WRITE = "evenkeel_write"
_AWAY_STATES = ("08", "53", "57P")
"""SQLSTATE prefixes: connection lost, no free connections, server starting or stopping."""


class UrlError(sa.exc.ArgumentError):
    """Error for a database URL that cannot be parsed, or is neither for SQLite nor for PostgreSQL."""


class SchemaError(RuntimeError):
    """Error for a database whose schema this version of Evenkeel cannot read."""


class Database:
    """Connections to ``url``: ``sqlite+aiosqlite:///FILE`` or ``postgresql+asyncpg://...`` (``?search_path=`` allowed).

    Every write is one transaction: committed when the block ends, rolled back when it raises.

    Raises:
        UrlError: ``url`` has neither form.
    """

    def __init__(self, url: str):
        parsed = parsed_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        arguments: dict[str, Any] = {}
        if self.is_sqlite:
            arguments = {"isolation_level": None, "timeout": BUSY_TIMEOUT_SECONDS}
        elif "search_path" in parsed.query:
            arguments = {"server_settings": {"search_path": str(parsed.query["search_path"])}}
            parsed = parsed.difference_update_query(["search_path"])
        self.url = parsed
        pool: dict[str, Any] = {} if self.is_sqlite else {"pool_size": NUM_CONNECTIONS, "max_overflow": 0}
        # Errors are logged, so the values, which may be large or secret, are hidden.
        self.engine = create_async_engine(parsed, connect_args=arguments, hide_parameters=True, **pool)
        # On PostgreSQL each statement sees its own snapshot, in a transaction or not. Reads use none, which saves the
        # round trips of BEGIN and ROLLBACK.
        self._reads = self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        # Writers of one process queue here; SQLite's own busy handler sleeps and is not fair.
        self._writers: asyncio.Lock | nullcontext[None] = asyncio.Lock() if self.is_sqlite else nullcontext()
        if self.is_sqlite:
            event.listen(self.engine.sync_engine, "connect", _set_pragmas)
            event.listen(self.engine.sync_engine, "begin", _begin)
        else:
            event.listen(self.engine.sync_engine, "checkin", _note_idle)
            event.listen(self.engine.sync_engine, "checkout", _refuse_dead)
            event.listen(self.engine.sync_engine, "handle_error", _as_operational, retval=True)

    async def start(self) -> None:
        """Create the SQLite file's directory and migrate the schema to the newest version, one process at a time."""
        if self.is_sqlite and self.url.database and self.url.database != ":memory:":
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
            # Only the owner may read the file, because it has hashes of keys; SQLite gives its companion files the same
            # mode. An existing file is not opened: closing it would drop the locks that this process's other
            # connections hold.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.url.database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        async with self.write() as connection:
            await self.exclusive(connection, "migrations")
            await connection.run_sync(migrate, "head")

    async def require_newest(self) -> None:
        """Refuse a database whose schema is not the newest, and leave it as it is.

        Raises:
            FileNotFoundError: The SQLite file does not exist, and SQLite would create it.
            SchemaError: The schema is older than this version's, or was written by a newer version.
        """
        file = self.url.database
        if self.is_sqlite and file and file != ":memory:" and not Path(file).exists():
            raise FileNotFoundError(f"there is no database at {Path(file).absolute()}")
        async with self.read() as connection:
            await connection.run_sync(_require_newest)

    async def stop(self) -> None:
        await self.engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for reading.

        On SQLite it sees one snapshot; on PostgreSQL each statement sees its own.
        """
        async with self._reads.connect() as connection:
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open one read-modify-write transaction."""
        async with self._writers, self.engine.connect() as connection:
            await connection.execution_options(**{_WRITE: True})
            async with connection.begin():
                yield connection

    async def exclusive(self, connection: AsyncConnection, name: str) -> None:
        """Take the lock ``name``, which no other process gets until this transaction ends.

        On SQLite this does nothing: a write excludes all other writes anyway.
        """
        if not self.is_sqlite:
            number = int.from_bytes(hashlib.sha256(f"evenkeel {name}".encode()).digest()[:8], "big", signed=True)
            await connection.execute(sa.text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})


def parsed_url(url: str) -> sa.URL:
    """Return the URL of a database, with its driver.

    Raises:
        UrlError: ``url`` is not a URL, or is neither for SQLite nor for PostgreSQL.
    """
    write = "write postgresql+asyncpg://USER:PASSWORD@HOST:PORT/DATABASE, or sqlite+aiosqlite:///FILE"
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):  # the text is not shown: a password may be in it
        raise UrlError(f"EVENKEEL_DATABASE_URL is no database URL: {write}") from None
    if parsed.drivername not in (*DRIVERS, *DRIVERS.values()):
        raise UrlError(f"EVENKEEL_DATABASE_URL has the unknown scheme {parsed.drivername}: {write}")
    return parsed.set(drivername=DRIVERS.get(parsed.drivername, parsed.drivername))


@functools.cache
def insert_new(dialect: str, table: sa.Table, *returning: sa.Column[Any]) -> sa.Insert:
    """Return an ``INSERT`` that skips rows whose key already exists; ``dialect``: name of the connection's dialect."""
    insert = (sqlite if dialect == "sqlite" else postgresql).insert(table).on_conflict_do_nothing()
    return insert.returning(*returning) if returning else insert


async def insert_together(connection: AsyncConnection, rows: Sequence[tuple[sa.Table, Mapping[str, Any]]]) -> None:
    """Insert ``rows``; each must come after the rows that it refers to.

    On PostgreSQL one statement, and so one round trip, inserts them all.
    """
    if connection.dialect.name == "sqlite":
        for table, row in rows:
            await connection.execute(table.insert(), row)
        return
    statement = _inserts(tuple((table, tuple(row)) for table, row in rows))
    values = {f"{number}_{name}": value for number, (_, row) in enumerate(rows) for name, value in row.items()}
    await connection.execute(statement, values)


@functools.lru_cache(maxsize=256)
def _inserts(rows: tuple[tuple[sa.Table, tuple[str, ...]], ...]) -> sa.Executable:
    """Build ``WITH a AS (INSERT ...), b AS (INSERT ...) SELECT 1``, which checks foreign keys after all inserts."""
    inserts = []
    for number, (table, names) in enumerate(rows):
        values = {name: sa.bindparam(f"{number}_{name}", type_=table.c[name].type) for name in names}
        # RETURNING a constant; otherwise SQLAlchemy would add RETURNING with the primary keys.
        inserts.append(sa.insert(table).values(values).returning(sa.literal_column("1")).cte(f"insert_{number}"))
    return sa.select(sa.literal_column("1")).add_cte(*inserts)


def migrate(connection: sa.Connection, revision: str) -> None:
    """Upgrade the schema within the connection's transaction, to ``revision`` or ``head``.

    Raises:
        SchemaError: The database was written by a newer version.
    """
    config, current, revisions = _revisions(connection)
    if current != revisions[0]:
        command.upgrade(config, revision)


def _revisions(connection: sa.Connection) -> tuple[Config, str | None, list[str]]:
    """Return Alembic's configuration, the database's revision (None if empty) and all known revisions, newest first."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    current = MigrationContext.configure(connection).get_current_revision()
    revisions = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if current is not None and current < revisions[-1]:
        raise SchemaError(
            f"the database is at revision {current}, of a version before 0.1.0: upgrade it with 0.1.0 first"
        )
    if current is not None and current not in revisions:
        raise SchemaError(
            f"the database is at revision {current}, which this version of Evenkeel does not know: "
            "it was written by a newer one; install that version, or restore an earlier backup"
        )
    return config, current, revisions


def _require_newest(connection: sa.Connection) -> None:
    _, current, revisions = _revisions(connection)
    if current != revisions[0]:
        raise SchemaError(
            f"the database is at revision {current}, this version of Evenkeel reads {revisions[0]}: "
            "start the service, which upgrades it"
        )


def _set_pragmas(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            # If several connections change the mode of a new file at once, SQLite refuses some without waiting.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            await_only(asyncio.sleep(0.01))
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _note_idle(connection: Any, record: Any) -> None:
    record.info["idle_since"] = time.monotonic()


def _refuse_dead(connection: Any, record: Any, proxy: Any) -> None:
    """Raise InvalidatePoolError for a dead connection, so that the pool opens a new connection.

    SQLAlchemy's own ping would take three round trips before every use.
    """
    driver = connection.driver_connection
    idle_since = record.info.pop("idle_since", None)
    if idle_since is None:  # a new connection
        return
    if not driver.is_closed():
        if time.monotonic() - idle_since < PING_AFTER_SECONDS:
            return
        try:
            await_only(driver.execute("SELECT 1"))
            return
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            driver.terminate()
    raise InvalidatePoolError


def _as_operational(context: ExceptionContext) -> OperationalError | None:
    """Convert an error of a server that refuses or has closed a connection to OperationalError; None for other errors.

    SQLAlchemy does not recognize such errors of asyncpg, and would report them as wrong statements.
    """
    if type(context.sqlalchemy_exception) is not DBAPIError:
        return None
    cause = context.original_exception
    state = getattr(cause, "sqlstate", None) or ""
    if context.connection is not None and not context.is_disconnect and not state.startswith(_AWAY_STATES):
        return None
    return OperationalError(
        context.statement, None, cause, hide_parameters=True, connection_invalidated=context.is_disconnect
    )


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITE) else "BEGIN")
