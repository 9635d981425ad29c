"""Tables of PostgreSQL with pgvector: ``postgresql://...?schema=S&index=hnsw``, one view for each collection.

Readers read a view that has the collection's name. A load makes a new table, fills it by binary COPY and replaces the
view, all in one transaction: a killed load leaves nothing. The view's comment has the identity of its rows. Privileges
that somebody has granted on the view stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np

from embeddings.sinks.base import Batch, Content, SinkBusy, SinkError
from embeddings.vectors.item_vectors import STATUS_NAMES

CONNECT_SECONDS = 10.0
LOAD_SECONDS = 7200.0
"""Longest load, its index included; if the server vanishes silently, the load ends only then."""
SWITCH_SECONDS = 600.0
"""Longest wait for transactions of readers that have read the view, before a load is given up."""
LOCK_MILLISECONDS = 500
"""Longest time that an attempt to switch makes new readers wait; then it is retried."""
INDEXES = ("none", "hnsw")
_MARK = "evenkeel "
"""Beginning of the comments of views and tables that sinks have made."""
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = b"\xff\xff"

Result = TypeVar("Result")


class PostgreSQLSink:
    """A schema of a database; its views have the columns id, status (a word), norm, vector and version.

    ``schema`` (default ``public``) and ``index`` are options of the URL. With ``index=hnsw`` each table gets an index
    for cosines before readers see it. All other options are libpq's.
    """

    def __init__(self, url: str):
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        self._schema, self._index = options.pop("schema", "public"), options.pop("index", "none")
        if self._index not in INDEXES:
            raise SinkError(f"index={self._index}: use {' or '.join(INDEXES)}")
        self._url = urlunsplit(parts._replace(query=urlencode(options)))

    def holds(self, table: str) -> str | None:
        return self._with(lambda connection: self._identity(connection, table))

    def load(self, content: Content) -> None:
        self._with(lambda connection: self._load(connection, content))

    def purge(self, table: str) -> None:
        self._with(lambda connection: self._purge(connection, table, SWITCH_SECONDS))

    def drop(self, table: str) -> None:
        async def remove(connection: Any) -> None:
            async with connection.transaction():
                await self._lock(connection, table)
                if await self._mark(connection, table) is not None:
                    await connection.execute(f"DROP VIEW {self._named(table)}")
                await self._drop_tables(connection, table, None, SWITCH_SECONDS)

        self._with(remove)

    # --- a load ------------------------------------------------------------------------------------------------------

    async def _load(self, connection: Any, content: Content) -> None:
        table = content.table
        async with connection.transaction():
            # A server that builds an index for a killed process stops.
            await connection.execute("SET LOCAL client_connection_check_interval = '5s'")
            await self._lock(connection, table)
            if await self._identity(connection, table) == content.identity:
                return
            vector = await self._prepare(connection, table)
            name = f"{table[:30]}_{hashlib.blake2b(table.encode(), digest_size=4).hexdigest()}_{content.identity}"
            id_type = "bigint" if content.id_type == "int64" else "text"
            await connection.execute(
                f"DROP TABLE IF EXISTS {self._named(name)}; CREATE TABLE {self._named(name)} (id {id_type} NOT NULL, "
                f"status smallint NOT NULL, norm real NOT NULL, vector {vector}({content.dim}) NOT NULL); "
                f"COMMENT ON TABLE {self._named(name)} IS '{_MARK}{table}'"
            )
            # Frozen: a reader's transaction that began before this one finds the new table, and must see its rows.
            done = await connection.copy_to_table(
                name, schema_name=self._schema, source=_copied(content), format="binary", freeze=True
            )
            if done != f"COPY {content.num_rows}":
                raise SinkError(f"'{table}': the server answered {done} to {content.num_rows} rows: see its log")
            await connection.execute(f"ALTER TABLE {self._named(name)} ADD PRIMARY KEY (id)")
            if self._index == "hnsw":
                operators = vector.replace("vector", "vector_cosine_ops")
                await connection.execute(f"CREATE INDEX ON {self._named(name)} USING hnsw (vector {operators})")
            await connection.execute(f"ANALYZE {self._named(name)}")
            mark = {"identity": content.identity, "table": name, "version": content.version}
            words = ", ".join(f"'{word}'" for word in STATUS_NAMES)
            # The cast takes the dimension out of the view's column, so that a version may have another.
            await self._when_free(
                connection,
                SWITCH_SECONDS,
                f"CREATE OR REPLACE VIEW {self._named(table)} AS SELECT id, (ARRAY[{words}])[status + 1] AS status, "
                f"norm, vector::{vector} AS vector, '{content.version}'::text AS version FROM {self._named(name)}; "
                f"COMMENT ON VIEW {self._named(table)} IS '{_MARK}{json.dumps(mark)}'",
            )
        # If somebody still reads the table before, purge or the next load removes it.
        with contextlib.suppress(SinkError):
            await self._purge(connection, table, seconds=0.0)

    async def _purge(self, connection: Any, table: str, seconds: float) -> None:
        async with connection.transaction():
            await self._lock(connection, table)
            mark = await self._mark(connection, table)
            await self._drop_tables(connection, table, None if mark is None else mark["table"], seconds)

    async def _prepare(self, connection: Any, table: str) -> str:
        """Make schema and extension if they are missing, and return the name of the type of vectors."""
        if not await connection.fetchval("SELECT 1 FROM pg_namespace WHERE nspname = $1", self._schema):
            await connection.execute(f"CREATE SCHEMA {_quoted(self._schema)}")
        if not await connection.fetchval("SELECT 1 FROM pg_extension WHERE extname = 'vector'"):
            if not await connection.fetchval("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
                raise SinkError("the server has no pgvector: install it there (https://github.com/pgvector/pgvector)")
            await connection.execute("CREATE EXTENSION vector")
        place = await connection.fetchval(
            "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'vector'"
        )
        other = await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", self._named(table))
        if other and await self._mark(connection, table) is None:
            raise SinkError(f"'{table}' of schema {self._schema} is not Evenkeel's: rename it, or use another schema")
        return f"{_quoted(place)}.vector"

    async def _lock(self, connection: Any, table: str) -> None:
        """Take the lock of the one process that may load a table, until the transaction ends."""
        lock = "SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))"
        if not await connection.fetchval(lock, f"{_MARK}{self._schema}.{table}"):
            raise SinkBusy(f"another process is loading '{table}'")

    async def _when_free(self, connection: Any, seconds: float, statement: str) -> None:
        """Execute a statement that locks objects exclusively, as soon as no reader's transaction uses them."""
        from asyncpg import LockNotAvailableError  # type: ignore[import-untyped]

        deadline = time.monotonic() + seconds
        while True:
            try:
                async with connection.transaction():
                    await connection.execute(f"SET LOCAL lock_timeout = {LOCK_MILLISECONDS}")
                    await connection.execute(statement)
                return
            except LockNotAvailableError:
                if time.monotonic() > deadline:
                    raise SinkError(
                        "transactions of readers keep a version in use: end those that are idle (pg_stat_activity)"
                    ) from None
                await asyncio.sleep(LOCK_MILLISECONDS / 1000)

    async def _drop_tables(self, connection: Any, table: str, besides: str | None, seconds: float) -> None:
        names = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace($1) "
            "AND obj_description(oid, 'pg_class') = $2 AND relname IS DISTINCT FROM $3",
            _quoted(self._schema), f"{_MARK}{table}", besides,
        )  # fmt: skip
        for (name,) in names:
            await self._when_free(connection, seconds, f"DROP TABLE {self._named(name)}")

    # --- state -------------------------------------------------------------------------------------------------------

    async def _identity(self, connection: Any, table: str) -> str | None:
        mark = await self._mark(connection, table)
        return None if mark is None else mark["identity"]

    async def _mark(self, connection: Any, table: str) -> dict[str, str] | None:
        """Return identity, table and version of a view's rows; None if there is no view that a sink has made."""
        query = "SELECT obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass($1) AND relkind = 'v'"
        comment = await connection.fetchval(query, self._named(table))
        if comment is None or not comment.startswith(f"{_MARK}{{"):
            return None
        return json.loads(comment.removeprefix(_MARK))

    def _named(self, name: str) -> str:
        return f"{_quoted(self._schema)}.{_quoted(name)}"

    def _with(self, call: Callable[[Any], Awaitable[Result]]) -> Result:
        async def connected() -> Result:
            import asyncpg

            # Without cached statements it also works behind a pooler of transactions.
            connection = await asyncpg.connect(self._url, timeout=CONNECT_SECONDS, statement_cache_size=0)
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    return await call(connection)
            finally:
                with contextlib.suppress(TimeoutError):
                    await connection.close(timeout=CONNECT_SECONDS)

        return asyncio.run(connected())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


async def _copied(content: Content) -> AsyncIterator[bytes]:
    """Yield the rows in the binary format of COPY, vectors as pgvector's ``vector_recv`` reads them."""
    yield _COPY_HEADER
    for batch in content.batches():
        yield _copied_rows(batch)
    yield _COPY_END


def _copied_rows(batch: Batch) -> bytes:
    """Return rows as COPY reads them: for each row the number of fields, then each field's length and bytes."""
    num_rows, dim = batch.vectors.shape
    width = batch.keys.dtype.itemsize
    is_text = batch.keys.dtype.kind == "S"
    layout = np.dtype(
        [
            ("fields", ">i2"),
            ("id_length", ">i4"), ("id", f"S{width}" if is_text else ">i8"),
            ("status_length", ">i4"), ("status", ">i2"),
            ("norm_length", ">i4"), ("norm", ">f4"),
            ("vector_length", ">i4"), ("dim", ">i2"), ("unused", ">i2"), ("vector", ">f4", (dim,)),
        ]
    )  # fmt: skip
    lengths = np.char.str_len(batch.keys) if is_text else np.full(num_rows, width)
    rows = np.zeros(num_rows, dtype=layout)
    rows["fields"], rows["id_length"], rows["id"] = 4, lengths, batch.keys
    rows["status_length"], rows["status"] = 2, batch.statuses
    rows["norm_length"], rows["norm"] = 4, batch.norms
    rows["vector_length"], rows["dim"], rows["vector"] = 4 + 4 * dim, dim, batch.vectors
    if not is_text:
        return rows.tobytes()
    # Texts differ in length: remove the zeros that pad them.
    table = rows.view(np.uint8).reshape(num_rows, layout.itemsize)
    kept = np.ones(table.shape, dtype=np.bool_)
    start = layout.fields["id"][1] if layout.fields is not None else 0
    kept[:, start : start + width] = np.arange(width) < lengths[:, None]
    return table[kept].tobytes()
