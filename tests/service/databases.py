"""Databases at the newest revision: what the migrations made once is made again, without Alembic."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import event

from service.core.database import Database


def migrated_file(folder: Path) -> Path:
    """A SQLite database without rows, to be copied."""
    file = folder / "evenkeel.db"
    asyncio.run(_migrate(f"sqlite+aiosqlite:///{file}"))
    return file


def statements_of_migrations(postgres: str) -> str:
    """What the migrations send to a PostgreSQL: for an empty schema, by the search path."""
    schema, sent = new_schema(), list[str]()
    execute(postgres, f"CREATE SCHEMA {schema}")
    try:
        asyncio.run(_migrate(f"{postgres}?search_path={schema}", sent))
    finally:
        execute(postgres, f"DROP SCHEMA {schema} CASCADE")
    return ";\n".join(sent)


def new_schema() -> str:
    return f"evenkeel_{uuid.uuid4().hex[:12]}"


def execute(postgres: str, statements: str) -> None:
    """In one transaction of a connection of its own."""

    async def connect_and_execute() -> None:
        connection = await asyncpg.connect(postgres.replace("+asyncpg", ""), timeout=300)
        try:
            await connection.execute(statements)
        finally:
            await connection.close()

    asyncio.run(connect_and_execute())


async def _migrate(url: str, sent: list[str] | None = None) -> None:
    database = Database(url)

    def note(_: Any, cursor: Any, statement: str, parameters: Any, *more: Any) -> None:
        if sent is None or statement.startswith("SELECT"):
            return
        assert not parameters, f"a migration sends values, which replaying its statements would leave out: {statement}"
        sent.append(statement)

    event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    await database.start()
    await database.stop()
