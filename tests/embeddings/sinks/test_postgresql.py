"""A schema of PostgreSQL with pgvector: privileges, indexes, and transactions of readers that stay open."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import numpy as np
import pytest

from embeddings.sinks import postgresql
from embeddings.sinks.base import Batch, Content, SinkError
from embeddings.sinks.registry import open_sink
from tests.support import sinks
from tests.support.sinks import OfPostgreSQL

pytestmark = [pytest.mark.anyio, pytest.mark.twin]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def readable(tmp_path: Path) -> Iterator[OfPostgreSQL]:
    with sinks.readable("postgresql", tmp_path) as sink:
        assert isinstance(sink, OfPostgreSQL)
        yield sink


def content(number: int, num_rows: int = 1000, dim: int = 3) -> Content:
    vectors = np.random.default_rng(0).standard_normal((num_rows, dim)).astype(np.float32)
    batch = Batch(np.arange(num_rows), np.ones(num_rows, np.uint8), np.full(num_rows, number, np.float32), vectors)
    return Content("items", f"v{number:06d}", f"{number:016x}", "int64", dim, num_rows, lambda: iter([batch]))


@contextlib.asynccontextmanager
async def connected(readable: OfPostgreSQL) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(readable.address)
    try:
        yield connection
    finally:
        connection.terminate()


async def test_the_index_is_there_before_readers_are_and_privileges_stay(readable: OfPostgreSQL) -> None:
    sink = open_sink(f"{readable.url}&index=hnsw")
    await asyncio.to_thread(sink.load, content(1))
    view = f"{readable.schema}.items"
    async with connected(readable) as connection:
        await connection.execute(f"GRANT SELECT ON {view} TO PUBLIC")
        await asyncio.to_thread(sink.load, content(2))
        plan = await connection.fetch(f"EXPLAIN SELECT id FROM {view} ORDER BY vector <=> '[1, 2, 3]' LIMIT 5")
        assert "Index Scan" in str(plan)
        assert await connection.fetchval("SELECT has_table_privilege('pg_monitor', $1, 'SELECT')", view)


async def test_a_transaction_that_reads_holds_the_switch_up_and_nobody_else(
    readable: OfPostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_sink(readable.url)
    await asyncio.to_thread(sink.load, content(1))
    norms = f"SELECT DISTINCT norm FROM {readable.schema}.items"
    waiting = f"SELECT 1 FROM pg_locks WHERE NOT granted AND relation = '{readable.schema}.items'::regclass"
    async with connected(readable) as first, connected(readable) as second, asyncio.timeout(60):
        async with first.transaction():
            assert await first.fetchval(norms) == 1
            monkeypatch.setattr(postgresql, "SWITCH_SECONDS", 0.0)
            with pytest.raises(SinkError, match="transactions of readers"):
                await asyncio.to_thread(sink.load, content(2))
            monkeypatch.setattr(postgresql, "SWITCH_SECONDS", 60.0)
            loading = asyncio.create_task(asyncio.to_thread(sink.load, content(2)))
            for is_waiting in (1, None, 1):  # the switch lets go of its place in the queue, and tries again
                while await second.fetchval(waiting) != is_waiting:
                    assert not loading.done()
                    assert await second.fetchval(norms, timeout=5) == 1
        await loading
        assert await second.fetchval(norms) == 2


async def test_a_transaction_of_an_older_snapshot_sees_a_whole_version_too(readable: OfPostgreSQL) -> None:
    sink = open_sink(readable.url)
    await asyncio.to_thread(sink.load, content(1))
    async with connected(readable) as reader, reader.transaction(isolation="repeatable_read"):
        await reader.fetchval("SELECT count(*) FROM pg_class")
        await asyncio.to_thread(sink.load, content(2))
        rows = await reader.fetchrow(f"SELECT count(*), min(norm), max(norm) FROM {readable.schema}.items")
        assert tuple(rows) == (1000, 2, 2)


async def test_a_reader_of_the_table_itself_does_not_hold_the_switch_up(readable: OfPostgreSQL) -> None:
    sink = open_sink(readable.url)
    await asyncio.to_thread(sink.load, content(1))
    tables = f"SELECT tablename FROM pg_tables WHERE schemaname = '{readable.schema}'"
    async with connected(readable) as reader, asyncio.timeout(60):
        async with reader.transaction():
            old = await reader.fetchval(tables)
            await reader.fetch(f"SELECT 1 FROM {readable.schema}.{old}")
            await asyncio.to_thread(sink.load, content(2))
            assert await reader.fetchval(f"SELECT DISTINCT norm FROM {readable.schema}.items") == 2
        await asyncio.to_thread(sink.purge, "items")
        assert len(await reader.fetch(tables)) == 1


async def test_two_collections_of_one_long_beginning_have_tables_of_their_own(readable: OfPostgreSQL) -> None:
    sink = open_sink(readable.url)
    names = ["i" * 62 + end for end in "ab"]
    for name in names:
        await asyncio.to_thread(sink.load, dataclasses.replace(content(1), table=name))
    await asyncio.to_thread(sink.drop, names[0])
    assert await asyncio.to_thread(sink.holds, names[0]) is None
    assert await asyncio.to_thread(readable.rows, names[1])
