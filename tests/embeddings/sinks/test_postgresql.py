"""A schema of PostgreSQL with pgvector: privileges, indexes, and transactions of readers that stay open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    import asyncio

    return await asyncio.to_thread(call, *arguments)


async def test_the_index_is_there_before_readers_are_and_privileges_stay(readable: OfPostgreSQL) -> None:
    sink = open_sink(f"{readable.url}&index=hnsw")
    await in_thread(sink.load, content(1))
    connection = await asyncpg.connect(readable.address)
    view = f"{readable.schema}.items"
    try:
        await connection.execute(f"GRANT SELECT ON {view} TO PUBLIC")
        await in_thread(sink.load, content(2))
        plan = await connection.fetch(f"EXPLAIN SELECT id FROM {view} ORDER BY vector <=> '[1, 2, 3]' LIMIT 5")
        assert "Index Scan" in str(plan)
        assert await connection.fetchval("SELECT has_table_privilege('pg_monitor', $1, 'SELECT')", view)
    finally:
        await connection.close()


async def test_a_transaction_that_reads_holds_the_switch_up_and_nobody_else(
    readable: OfPostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = open_sink(readable.url)
    await in_thread(sink.load, content(1))
    first = await asyncpg.connect(readable.address)
    norms = f"SELECT DISTINCT norm FROM {readable.schema}.items"
    transaction = first.transaction()
    await transaction.start()
    assert await first.fetchval(norms) == 1
    monkeypatch.setattr(postgresql, "SWITCH_SECONDS", 0.0)
    with pytest.raises(SinkError, match="transactions of readers"):
        await in_thread(sink.load, content(2))
    monkeypatch.setattr(postgresql, "SWITCH_SECONDS", 60.0)
    loader = threading.Thread(target=sink.load, args=(content(2),))
    loader.start()
    second = await asyncpg.connect(readable.address)
    for _ in range(20):  # new readers wait for half a second at most
        assert await second.fetchval(norms, timeout=5) == 1
    await transaction.rollback()
    await in_thread(loader.join)
    assert await second.fetchval(norms) == 2
    for connection in (first, second):
        await connection.close()


async def test_a_reader_of_the_table_itself_does_not_hold_the_switch_up(readable: OfPostgreSQL) -> None:
    sink = open_sink(readable.url)
    await in_thread(sink.load, content(1))
    reader = await asyncpg.connect(readable.address)
    tables = f"SELECT tablename FROM pg_tables WHERE schemaname = '{readable.schema}'"
    old = await reader.fetchval(tables)
    transaction = reader.transaction()
    await transaction.start()
    await reader.fetch(f"SELECT 1 FROM {readable.schema}.{old}")
    await in_thread(sink.load, content(2))
    assert await reader.fetchval(f"SELECT DISTINCT norm FROM {readable.schema}.items") == 2
    await transaction.rollback()
    await in_thread(sink.purge, "items")
    assert len(await reader.fetch(tables)) == 1
    await reader.close()


async def test_two_collections_of_one_long_beginning_have_tables_of_their_own(readable: OfPostgreSQL) -> None:
    import dataclasses

    sink = open_sink(readable.url)
    names = ["i" * 62 + end for end in "ab"]
    for name in names:
        await in_thread(sink.load, dataclasses.replace(content(1), table=name))
    await in_thread(sink.drop, names[0])
    assert await in_thread(sink.holds, names[0]) is None
    assert await in_thread(readable.rows, names[1])
