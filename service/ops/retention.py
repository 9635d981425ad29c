"""Removal of old data, once a day: ended jobs, their logs, checkpoints and events, firings, idempotency keys, sessions.

If several processes share a database or EVENKEEL_HOME, the process that claims the day's row in table ``sweep`` does
the sweep. The database has one sweep for its rows; each EVENKEEL_HOME has its own sweep for the data of its jobs. A
checkpoint stays, however old, while a kept version, an unended job or a schedule may need it
(docs/adr/0027-schedules-and-clocks.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from embeddings.store import Store
from service.core import tables
from service.core.database import Database
from service.core.errors import Problem
from service.core.settings import Settings
from service.core.task_health import TaskHealth, repeat
from service.core.tenants import store_of
from service.identity import idempotency
from service.jobs import job_records, stored_runs
from service.jobs.executors.base import read_record
from service.jobs.runner_context import read_home_id
from service.jobs.states import TERMINAL
from trainer.runs.directory import BEST, CHECKPOINTS, DATA_PARTS, RUN_FILE, TASK_RESULTS
from trainer.runs.protocol import LOG_FILE
from trainer.storage.base import StorageError

log = logging.getLogger("evenkeel.retention")

LOOK_SECONDS = 60.0
EVERY = datetime.timedelta(days=1)
AGAIN = datetime.timedelta(minutes=10)
"""Wait after a failed sweep before it is tried again."""
ROWS = "rows"


class Swept(NamedTuple):
    """Number of removed items by kind of item; in a dry run, the number that would be removed."""

    jobs: int = 0
    checkpoints: int = 0
    logs: int = 0
    events: int = 0
    firings: int = 0
    idempotency_keys: int = 0
    sessions: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in self._asdict().items())


async def run(database: Database, settings: Settings, store: Store, health: TaskHealth) -> None:
    """Sweep once a day until cancelled."""
    await repeat(lambda: sweep_if_due(database, settings, store, tables.now()), LOOK_SECONDS, health)


async def sweep_if_due(database: Database, settings: Settings, store: Store, now: datetime.datetime) -> Swept | None:
    """Do those of the day's sweeps that no other process has claimed; return None if there are none.

    A sweep that fails is due again ten minutes later.
    """
    swept = None
    if await _take(database, ROWS, now):
        async with _due_again(database, ROWS, now):
            swept = await sweep_rows(database, settings, now)
    home = read_home_id(settings.home)
    if home is not None and await _take(database, f"home {home}", now):
        async with _due_again(database, f"home {home}", now):
            swept = _sum(swept or Swept(), await sweep_home(database, settings, store, home, now))
    if swept is not None and any(swept):
        log.info("retention: removed %s", swept)
    return swept


async def sweep(
    database: Database, settings: Settings, store: Store, now: datetime.datetime, dry_run: bool = False
) -> Swept:
    """Sweep everything now, even if it was swept today."""
    swept = await sweep_rows(database, settings, now, dry_run)
    home = read_home_id(settings.home)
    return swept if home is None else _sum(swept, await sweep_home(database, settings, store, home, now, dry_run))


async def _take(database: Database, name: str, now: datetime.datetime) -> bool:
    """Claim the sweep ``name`` if it is due, and return True if it was.

    No process then claims it again before tomorrow, even if this process is killed.
    """
    table = tables.sweep
    this_sweep = table.c.name == name
    async with database.read() as connection:
        if _recent(await connection.scalar(sa.select(table.c.began_at).where(this_sweep)), now):
            return False
    async with database.write() as connection:
        await database.exclusive(connection, f"sweep {name}")
        began = await connection.scalar(sa.select(table.c.began_at).where(this_sweep))
        if _recent(began, now):
            return False
        statement = table.insert().values(name=name) if began is None else table.update().where(this_sweep)
        await connection.execute(statement.values(began_at=now))
    return True


@contextlib.asynccontextmanager
async def _due_again(database: Database, name: str, now: datetime.datetime) -> AsyncIterator[None]:
    """Make the sweep due again soon if the block fails, since the cause may be gone within minutes."""
    try:
        yield
    except Exception:
        async with database.write() as connection:
            began = tables.sweep.update().where(tables.sweep.c.name == name, tables.sweep.c.began_at == now)
            await connection.execute(began.values(began_at=now - EVERY + AGAIN))
        raise


def _recent(began: datetime.datetime | None, now: datetime.datetime) -> bool:
    # A start in the future comes from a clock that was set back afterwards.
    return began is not None and now - EVERY < began <= now


async def sweep_rows(database: Database, settings: Settings, now: datetime.datetime, dry_run: bool = False) -> Swept:
    """Remove the old rows of the database: firings, ended jobs' events except states, idempotency keys, sessions."""
    days = settings.retention
    event, firing, job = tables.job_event, tables.firing, tables.job
    ended = sa.select(job.c.id).where(job.c.state.in_(TERMINAL), job.c.finished_at < _before(now, days.events))
    old_firings = sa.and_(firing.c.fire_at_utc < _before(now, days.firings), firing.c.fire_at_utc < now)
    doomed = {
        "events": (event, sa.and_(event.c.type != "state", event.c.job_id.in_(ended))),
        "firings": (firing, old_firings),
        "idempotency_keys": (tables.idempotency, tables.idempotency.c.created_at < now - idempotency.KEPT),
        "sessions": (tables.session, tables.session.c.expires_at < now),
    }
    counts = {}
    for name, (table, old) in doomed.items():  # one transaction each, so that none blocks others for long
        async with database.write() if not dry_run else database.read() as connection:
            if dry_run:
                query = sa.select(sa.func.count()).select_from(table).where(old)
                counts[name] = int(await connection.scalar(query) or 0)
            else:
                counts[name] = (await connection.execute(table.delete().where(old))).rowcount
    return Swept(**counts)


async def sweep_home(
    database: Database, settings: Settings, store: Store, home: str, now: datetime.datetime, dry_run: bool = False
) -> Swept:
    """Remove the data of ended jobs under this EVENKEEL_HOME, and the jobs' rows, when their retention periods end.

    Raises:
        StoreError: A collection cannot be read, so it is unknown which checkpoints are still needed.
    """
    days, job = settings.retention, tables.job.c
    youngest = _before(now, min(days.jobs, days.checkpoints, days.logs))
    ended = sa.and_(job.state.in_(TERMINAL), job.released.is_(True), job.finished_at < youngest)
    of_home = sa.or_(job.home_id == home, job.home_id.is_(None))
    needed = await needed_jobs(database, settings, store)
    async with database.read() as connection:
        query = sa.select(job.id, job.finished_at).where(ended, of_home).order_by(job.id)
        rows = [(row.id, row.finished_at) for row in await connection.execute(query)]
    swept = Swept()
    for job_id, finished_at in rows:
        directory = settings.run_dir(job_id)
        if finished_at < _before(now, days.jobs) and job_id not in needed:
            removed = Swept(jobs=1, bytes=await asyncio.to_thread(_size, directory))
            if not dry_run:
                try:
                    await job_records.delete(database, settings, job_id, sweeping=True)
                except Problem:  # a moment ago it was queued again, named by another job, or deleted
                    continue
            swept = _sum(swept, removed)
            continue
        if finished_at < _before(now, days.checkpoints) and job_id not in needed:
            for name in (CHECKPOINTS, BEST, "data", DATA_PARTS, TASK_RESULTS):
                num_bytes = await asyncio.to_thread(_held, directory, name)
                if num_bytes is not None:
                    if not dry_run and not await _give_up(database, settings, job_id, name):
                        break
                    swept = _sum(swept, Swept(checkpoints=name == CHECKPOINTS, bytes=num_bytes))
        if finished_at < _before(now, days.logs) and (directory / LOG_FILE).exists():
            swept = _sum(swept, Swept(logs=1, bytes=_size(directory / LOG_FILE)))
            if not dry_run:
                (directory / LOG_FILE).unlink(missing_ok=True)
    return swept


async def _give_up(database: Database, settings: Settings, job_id: str, name: str) -> bool:
    """Remove the folder ``name`` of an ended run; return False if the job is active, gone or needed by another.

    The folder is renamed while the job is locked, so that it can neither be queued again nor be named by another job.
    Then it is deleted file by file.
    """
    directory = settings.run_dir(job_id)
    doomed = directory.with_name(f"{job_records.DELETED}{job_id}-{name}")
    async with database.write() as connection:
        try:
            row = await job_records.locked(connection, job_id)
        except Problem:
            return False
        if row["state"] not in TERMINAL or not row["released"] or job_id in await job_records.starts(connection):
            return False
        if (directory / name).is_dir():
            (directory / name).rename(doomed)
    await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)
    try:
        await asyncio.to_thread(stored_runs.remove_stored, directory, f"{name}/")
    except StorageError as error:
        log.warning("%s of job %s stays in its run storage until the next sweep: %s", name, job_id, error)
    return True


def _held(directory: Path, name: str) -> int | None:
    """Return the size of a run's folder on this host and in its run storage; None if it exists in neither."""
    try:
        stored = stored_runs.num_bytes(directory, f"{name}/")
    except StorageError as error:
        log.warning("%s: the size of its files in the run storage is unknown: %s", directory, error)
        return None
    return _size(directory / name) + stored if stored or (directory / name).is_dir() else None


async def needed_jobs(database: Database, settings: Settings, store: Store) -> set[str]:
    """Return the ids of jobs whose checkpoints a job, a schedule or a kept version may need.

    Raises:
        StoreError: A collection cannot be read.
    """
    async with database.read() as connection:
        # The tenants of all jobs, not of all keys: an operator may submit jobs for a tenant that has no key.
        owners = list(await connection.scalars(sa.select(tables.job.c.tenant).distinct()))
        named = await job_records.starts(connection)
        alive = list(await connection.scalars(sa.select(tables.job.c.id).where(tables.job.c.state.not_in(TERMINAL))))
    begun = [_begun_from(settings.run_dir(job_id)) for job_id in alive]
    behind_versions = await asyncio.to_thread(_behind_versions, store, owners)
    return {*named, *alive, *behind_versions, *(job_id for job_id in begun if job_id)}


def _behind_versions(store: Store, owners: Iterable[str]) -> set[str]:
    """Return the ids of the jobs that published versions which are served or can be promoted."""
    job_ids = set()
    for tenant in owners:
        tenant_store = store_of(store, tenant)
        for name in tenant_store.collections():
            manifests = tenant_store.collection(name).versions()
            job_ids |= {
                manifest["job"] for manifest in manifests if manifest["state"] != "expired" and manifest.get("job")
            }
    return job_ids


def _begun_from(run_dir: Path) -> str | None:
    """Return the job from whose checkpoint an unended run started, according to ``run.json``; else None."""
    checkpoint = read_record(run_dir / RUN_FILE).get("init_checkpoint")
    return Path(checkpoint).parent.name if checkpoint else None


def _before(now: datetime.datetime, days: float) -> datetime.datetime:
    return now - datetime.timedelta(days=days)


def _sum(first: Swept, second: Swept) -> Swept:
    return Swept(*map(sum, zip(first, second, strict=True)))


def _size(path: Path) -> int:
    total = 0
    for file in [path, *path.rglob("*")]:
        with contextlib.suppress(OSError):
            total += file.lstat().st_size if file.is_file() else 0
    return total
