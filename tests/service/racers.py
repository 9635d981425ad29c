"""Functions that tests run in several processes at once: writers of a counter, schedulers."""

from __future__ import annotations

import asyncio
from multiprocessing.synchronize import Barrier
from typing import Any

import sqlalchemy as sa

from service import scheduler, tables
from service.database import Database

COUNTER = "counter"


async def add(database: Database, times: int) -> None:
    """Reads the counter's value, and writes it back one higher."""
    table = tables.dataset
    for _ in range(times):
        async with database.write() as connection:
            query = sa.select(table.c.spec).where(table.c.name == COUNTER).with_for_update()
            count = (await connection.scalar(query))["count"]
            await asyncio.sleep(0)  # let the others in, where they can come in
            changed = table.update().where(table.c.name == COUNTER).values(spec={"count": count + 1})
            await connection.execute(changed)


def add_in_process(url: str, barrier: Barrier, writers: int, times: int) -> None:
    async def main() -> None:
        database = Database(url)
        barrier.wait(180)
        await asyncio.gather(*(add(database, times) for _ in range(writers)))
        await database.stop()

    asyncio.run(main())


def fire_in_process(url: str, barrier: Barrier, instants: list[Any]) -> None:
    """A scheduler that lives through these instants."""

    async def main() -> None:
        database = Database(url)
        barrier.wait(180)
        for now in instants:
            await scheduler.fire_due(database, now)
        await database.stop()

    asyncio.run(main())
