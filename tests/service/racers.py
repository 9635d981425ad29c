"""Functions that tests run in several processes at once: writers of a counter, schedulers, whole replicas."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from embeddings.store import open_store
from service.core import tables
from service.core.database import Database
from service.core.settings import Settings
from service.jobs.runner import Runner
from service.schedules import scheduler
from tests.service.small_run import SmallRuns

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
        barrier.wait(300)
        await asyncio.gather(*(add(database, times) for _ in range(writers)))
        await database.stop()

    asyncio.run(main())


def fire_in_process(url: str, barrier: Barrier, instants: list[Any]) -> None:
    """A scheduler that lives through these instants."""

    async def main() -> None:
        database = Database(url)
        barrier.wait(300)
        for now in instants:
            await scheduler.fire_due(database, now)
        await database.stop()

    asyncio.run(main())


class KilledAt:
    """Kills this process with SIGKILL at a database's nth step: before a statement, before a commit, after a commit."""

    def __init__(self, database: Database, step: int):
        self._left = step
        engine = database.engine.sync_engine
        event.listen(engine, "before_cursor_execute", lambda *_: self._pass())
        event.listen(engine, "commit", lambda _: self._pass())
        commit = engine.dialect.do_commit

        def committed(connection: Any) -> None:
            commit(connection)
            self._pass()

        engine.dialect.do_commit = committed  # type: ignore[method-assign]

    def _pass(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def fire_killed_everywhere(url: str, now: Any, report: str) -> None:
    """Forks schedulers that fire what is due, each killed one step later than the one before, until one ends by itself.
    Writes how each ended and what was in the database then: (signal, firings, jobs, firings that name their job)."""

    async def fire(step: int) -> None:
        database = Database(url)
        KilledAt(database, step)
        await scheduler.fire_due(database, now)
        await database.stop()

    async def look() -> list[int]:
        database = Database(url)
        both = sa.select(tables.firing.c.job_id).join(tables.job, tables.job.c.id == tables.firing.c.job_id)
        async with database.read() as connection:
            found = [
                await connection.scalar(sa.select(sa.func.count()).select_from(what))
                for what in (tables.firing, tables.job, both.subquery())
            ]
        await database.stop()
        return found

    found = []
    ended = signal.SIGKILL
    while ended == signal.SIGKILL:
        child = os.fork()
        if child == 0:
            asyncio.run(fire(len(found) + 1))
            os._exit(0)
        ended = os.WTERMSIG(os.waitpid(child, 0)[1])
        found.append([ended, *asyncio.run(look())])
    Path(report).write_text(json.dumps(found))


class DiesAtLaunch(SmallRuns):
    """Is killed between the start of its second run and the moment when that run's file names it."""

    def launched_but_not_named(self) -> None:
        if len(self.launched) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def replica(
    url: str, home: Path, data: Path, barrier: Barrier | None, instants: list[Any], stop: Path, dies: bool = False
) -> None:
    """A service's scheduler and runner. Its clock shows these instants, one after the other, forward and back; then it
    runs jobs until the file ``stop`` is there. One that ``dies`` does so at a launch."""

    async def live() -> None:
        settings = Settings(home=home, database_url=url, data_roots=(data,), retry_backoff_seconds=0.05)
        settings.runs.mkdir(parents=True, exist_ok=True)
        database = Database(url)
        runner = Runner(database, settings, open_store(settings.store_url), DiesAtLaunch() if dies else SmallRuns())
        assert runner.acquire()
        if barrier is not None:
            barrier.wait(300)
        seen = None
        for now in instants:
            if seen is None or now < seen:
                await scheduler.look_again(database, now)
            seen = now
            await scheduler.fire_due(database, now)
            await runner.round()
        while not stop.exists():
            await runner.round()
            await asyncio.sleep(0.05)
        runner.close()
        await database.stop()

    asyncio.run(live())
