"""Gauges computed at each scrape, from the database, the feature store and the disks.

The gauges cover jobs, runs, schedules and their lateness, versions and the gate's verdicts, and free disk space. They
are computed from stored data each time, so neither a restart nor a second replica distorts them.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily as Gauge
from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.refresh.held_versions import held_in_a_row
from embeddings.refresh.scratch import is_scratch
from embeddings.refresh.settings import MAX_HELD
from embeddings.sinks.follow import sinks_of
from embeddings.store import Collection, Store, StoreError
from service.core import tables
from service.core.database import Database
from service.core.settings import Settings
from service.core.tenants import DEFAULT_TENANT, qualified, store_of
from service.features.store_health import StoreHealth
from service.identity import keys
from service.identity.auth import AWAY
from service.jobs.states import ACTIVE, STATES, TERMINAL

VERSION_STATES = ("candidate", "published", "held", "superseded", "expired")
RECENT = datetime.timedelta(days=7)
HOUR = datetime.timedelta(hours=1)
PATIENCE_SECONDS = 3.0
"""Longest wait for the database, and for the store's server, in a scrape, which may take ten seconds in all."""
MAX_JOB_NAMES = 200
"""Most job names with metrics of their own, since users may choose a new name for each job."""
_PROGRESS = {
    "examples_per_second": ("evenkeel_run_examples_per_second", "Training examples per second."),
    "step_seconds": ("evenkeel_run_step_seconds", "Mean time of a step."),
    "waited_seconds": ("evenkeel_run_waited_seconds", "Time that steps of this attempt waited for their batches."),
    "loss": ("evenkeel_run_loss", "Mean training loss of the epoch so far."),
    "epoch": ("evenkeel_run_epoch", "Current epoch, counted from 1."),
    "files_behind": ("evenkeel_run_files_behind", "Files in the followed folder that are not yet begun."),
    "seconds_behind": (
        "evenkeel_run_seconds_behind",
        "Age in seconds of the oldest file or message that is not yet begun.",
    ),
    "late_files": ("evenkeel_run_late_files", "Files that came too late to be read."),
    "messages_behind": ("evenkeel_run_messages_behind", "Messages of the followed topic that are not yet begun."),
    "bad_rows": ("evenkeel_run_bad_rows", "Bad rows of the followed topic, which were left out."),
}

log = logging.getLogger("evenkeel")


def _gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(name, text, labels=labels)


async def of_service(settings: Settings, database: Database, store: Store, store_health: StoreHealth) -> list[Metric]:
    """Return the gauges of disks, database and store that a service in the settings' role reports.

    If the database or the store's server does not answer, its gauges are left out.
    """
    families = of_disks(settings.home, settings.store_url)
    # Tenants that this process has served, for the case that the database is not queried.
    known_tenants = [DEFAULT_TENANT, *store.namespaces()]
    if settings.role != "vectors":
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                families += await of_database(database)
                async with database.read() as connection:
                    known_tenants = [row.name for row in await connection.execute(keys.tenants())]
        except AWAY as error:
            log.error("metrics: the database cannot be read: %s: %s", type(error).__name__, error)
    if settings.role == "scheduler":
        return families
    answer = await asyncio.to_thread(store_health.answer, PATIENCE_SECONDS)
    if answer is None or answer.reached:
        return families + await asyncio.to_thread(of_store, store, known_tenants)
    # Every collection would wait for the server.
    return [*families, _damaged(store.damaged())]


async def of_database(database: Database) -> list[Metric]:
    """Return jobs by state, the longest wait, heartbeats, current runs, held-out metrics and lateness."""
    now = tables.now()
    job, schedule = tables.job.c, tables.schedule.c
    async with database.read() as connection:
        counted = await connection.execute(sa.select(job.state, sa.func.count()).group_by(job.state))
        counts = {row[0]: row[1] for row in counted}
        # A retry that is not due yet waits for its time, not for resources.
        due = sa.and_(job.state == "queued", sa.or_(job.not_before.is_(None), job.not_before <= now))
        # A retried job has waited since it became due again, not since it was created.
        since = sa.func.min(sa.func.coalesce(job.not_before, job.created_at), type_=tables.UtcTime)
        oldest = await connection.scalar(sa.select(since).where(due))
        beat = await connection.scalar(sa.select(sa.func.min(job.heartbeat_at)).where(job.state.in_(ACTIVE)))
        columns = (job.id, job.tenant, job.name, job.started_at, job.heartbeat_at, job.progress)
        active = (await connection.execute(sa.select(*columns).where(job.state.in_(ACTIVE)))).mappings().all()
        late = await connection.scalar(sa.select(sa.func.min(schedule.next_fire_at)).where(schedule.paused.is_(False)))
        just_failed = sa.and_(job.state == "failed", job.finished_at >= now - HOUR)
        failed = await connection.scalar(sa.select(sa.func.count()).select_from(tables.job).where(just_failed))
        figures = await _figures(connection, now)
    jobs = _gauge("evenkeel_jobs", "Jobs by state.", ["state"])
    for state in STATES:
        jobs.add_metric([state], counts.get(state, 0))
    return [
        jobs,
        Gauge("evenkeel_jobs_failed_last_hour", "Jobs that failed within the last hour.", failed or 0),
        Gauge("evenkeel_queue_wait_seconds", "Longest wait of a job that could start.", _seconds(oldest, now)),
        Gauge("evenkeel_heartbeat_age_seconds", "Longest time since a run's last sign of life.", _seconds(beat, now)),
        Gauge("evenkeel_scheduler_lag_seconds", "Delay of the most overdue firing.", max(0.0, _seconds(late, now))),
        *_runs([dict(row) for row in active], now),
        figures,
    ]


def _runs(active: list[dict[str, Any]], now: datetime.datetime) -> list[Metric]:
    families = {
        field: _gauge(name, f"{text} One value per current run.", ["job", "name"])
        for field, (name, text) in _PROGRESS.items()
    }
    lasted = _gauge("evenkeel_run_seconds", "Time since the first attempt of each current run began.", ["job", "name"])
    for row in active:
        labels = [row["id"], qualified(row["tenant"], row["name"])]
        lasted.add_metric(labels, _seconds(row["started_at"], now))
        for field, family in families.items():
            value = (row["progress"] or {}).get(field)
            if value is not None:
                family.add_metric(labels, value)
    return [*families.values(), lasted]


async def _figures(connection: AsyncConnection, now: datetime.datetime) -> Metric:
    """Return the last epoch's loss, AUC and other metrics of each job name's latest job that ended within a week."""
    job, metric = tables.job.c, tables.job_metric.c
    ended = sa.and_(job.state.in_(TERMINAL), job.finished_at >= now - RECENT)
    measured = sa.exists().where(metric.job_id == job.id)
    latest = (
        sa.select(job.tenant, job.name, sa.func.max(job.id).label("id"))
        .where(ended, measured)
        .group_by(job.tenant, job.name)
        .order_by(sa.func.max(job.id).desc())
        .limit(MAX_JOB_NAMES)
        .subquery()
    )
    query = sa.select(latest.c.tenant, latest.c.name, tables.job_metric).join(latest, latest.c.id == metric.job_id)
    last = {}
    for row in (await connection.execute(query.order_by(metric.epoch))).mappings():
        for name, value in row["values"].items():
            if isinstance(value, int | float):
                last[qualified(row["tenant"], row["name"]), row["split"], name] = float(value)
    family = _gauge(
        "evenkeel_job_metric", "Last epoch's metrics of each job name's latest job.", ["name", "split", "metric"]
    )
    for labels, value in last.items():
        family.add_metric(list(labels), value)
    return family


def of_store(store: Store, known_tenants: Iterable[str] = (DEFAULT_TENANT,)) -> list[Metric]:
    """Return gauges of the store: versions by state, age of served versions, gate verdicts, sinks, damage; blocking.

    A collection that cannot be read is counted in a gauge of its own, and the other collections are still reported.
    """
    now = tables.now()
    age = _gauge("evenkeel_collection_age_seconds", "Seconds since the version served now was written.", ["collection"])
    rows = _gauge("evenkeel_collection_rows", "Items in the version served now.", ["collection"])
    versions = _gauge("evenkeel_collection_versions", "Versions that are kept, by state.", ["collection", "state"])
    held = _gauge("evenkeel_collection_held", "Versions held in a row since the last switch.", ["collection"])
    since = _gauge(
        "evenkeel_collection_held_seconds", "Seconds since the first of these was held; 0 without any.", ["collection"]
    )
    most = _gauge(
        "evenkeel_collection_max_held", "Number of versions held in a row that raises an alert.", ["collection"]
    )
    gate = _gauge("evenkeel_gate_value", "Measurements of the gate on the newest version.", ["collection", "metric"])
    failed = _gauge("evenkeel_gate_failed", "Checks that the newest version failed.", ["collection"])
    unreadable = _gauge(
        "evenkeel_collection_unreadable", "1 if the collection's manifests cannot be read.", ["collection"]
    )
    lag = _gauge(
        "evenkeel_sink_lag_seconds",
        "Seconds since the first change that the sink lacks; 0: none.",
        ["collection", "sink"],
    )
    for name, collection in _collections(store, known_tenants):
        try:
            manifests = collection.versions()
            sinks = sinks_of(collection)
        except (StoreError, OSError):
            unreadable.add_metric([name], 1)
            continue
        unreadable.add_metric([name], 0)
        for state in VERSION_STATES:
            versions.add_metric([name, state], sum(manifest["state"] == state for manifest in manifests))
        served = next((index for index, manifest in enumerate(manifests) if manifest["state"] == "published"), None)
        if served is not None:
            age.add_metric([name], _seconds(datetime.datetime.fromisoformat(manifests[served]["created_at"]), now))
            rows.add_metric([name], manifests[served]["rows"])
        for sink in sinks:
            lag.add_metric([name, sink["name"]], sink["lag_seconds"])
        row = held_in_a_row(collection, manifests)
        held.add_metric([name], len(row))
        begun = datetime.datetime.fromisoformat(row[0]["created_at"]) if row else None
        since.add_metric([name], _seconds(begun, now))
        most.add_metric([name], manifests[-1].get("max_held", MAX_HELD) if manifests else MAX_HELD)
        if manifests:
            checks = manifests[-1]["gate"]
            failed.add_metric([name], sum(check.get("verdict") == "fail" for check in checks))
            for check in checks:
                if isinstance(check.get("value"), int | float):
                    gate.add_metric([name, str(check["metric"])], check["value"])
    return [age, rows, versions, held, since, most, gate, failed, unreadable, lag, _damaged(store.damaged())]


def _collections(store: Store, known_tenants: Iterable[str]) -> Iterator[tuple[str, Collection]]:
    for tenant in known_tenants:
        tenant_store = store_of(store, tenant)
        for name in itertools.filterfalse(is_scratch, tenant_store.collections()):
            yield qualified(tenant, name), tenant_store.collection(name)


def _damaged(damaged: Mapping[str, Mapping[str, str]]) -> Metric:
    text = "Versions of a collection that this process found damaged and does not serve."
    family = _gauge("evenkeel_store_damaged_versions", text, ["collection"])
    for name, versions in damaged.items():
        family.add_metric([name], len(versions))
    return family


def of_disks(home: Path, store_url: str) -> list[Metric]:
    """Return the free space of EVENKEEL_HOME, and of the feature store if it is a directory on another disk."""
    free = _gauge("evenkeel_disk_free_bytes", "Free space of the disk of EVENKEEL_HOME, and of the store's.", ["disk"])
    size = _gauge("evenkeel_disk_bytes", "Size of these disks.", ["disk"])
    store = Path(store_url)
    disks = {"home": home}
    if "://" not in store_url and store.is_dir() and store.stat().st_dev != home.stat().st_dev:
        disks["store"] = store
    for name, path in disks.items():
        usage = shutil.disk_usage(path)
        free.add_metric([name], usage.free)
        size.add_metric([name], usage.total)
    return [free, size]


def _seconds(since: datetime.datetime | None, now: datetime.datetime) -> float:
    return 0.0 if since is None else (now - since).total_seconds()
