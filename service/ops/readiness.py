"""Readiness of the service: database, disk, feature store and background tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

import sqlalchemy as sa

from service.core import disk
from service.core.database import Database
from service.core.settings import Settings

READY_SECONDS = 5.0
log = logging.getLogger("evenkeel")


class Readiness(NamedTuple):
    """The state of the service.

    ``checks`` maps each part to ``ok`` or a description of its problem. ``unfit`` names the failed parts that requests
    cannot do without. ``is_well`` is True if no part has a problem that affects the service.
    """

    checks: dict[str, str]
    unfit: tuple[str, ...]
    is_well: bool

    @property
    def status(self) -> str:
        """``ok``, or ``degraded`` if some part has a problem."""
        return "ok" if self.is_well else "degraded"


async def readiness(state: Any) -> Readiness:
    """Check every part of the service.

    ``state`` is the application's state: it must have settings, database, store, store_health and task_health.
    """
    level, said_of_disk = _disk(state.settings)
    checks = {"database": await _database(state.database), "disk": said_of_disk}
    is_vectors = state.settings.role == "vectors"
    fit = {"database": checks["database"] == "ok" or is_vectors, "disk": level != "full"}
    store = await asyncio.to_thread(state.store_health.answer, READY_SECONDS)
    if store is not None:
        checks["store"] = store.message
        fit["store"] = store.serves or not is_vectors
    is_well = checks["database"] == "ok" and level in ("ok", "low") and (store is None or store.reached)
    if damaged := sum(map(len, state.store.damaged().values())):
        checks["vectors"] = f"{damaged} versions are damaged and not served: the service's log names them"
        is_well = False
    for task in state.task_health:
        task_is_well, checks[task.name] = task.verdict()
        is_well = is_well and task_is_well
    return Readiness(checks, tuple(name for name, one in fit.items() if not one), is_well)


async def _database(database: Database) -> str:
    try:
        async with asyncio.timeout(READY_SECONDS), database.read() as connection:
            await connection.execute(sa.text("SELECT version_num FROM alembic_version"))
    except Exception as error:  # any error of the driver is the answer here, not a failure of the route
        # Anyone may read this, so the database's address and user appear only in the log.
        log.error("database: %s: %s", type(error).__name__, error)
        return "cannot be used: the service's log says why"
    return "ok"


def _disk(settings: Settings) -> tuple[disk.Level, str]:
    try:
        free_space = disk.space(settings)
    except OSError as error:
        log.error("disk: %s", error)
        return "full", "EVENKEEL_HOME cannot be examined: the service's log says why"
    return free_space.level, free_space.message
