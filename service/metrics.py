"""Prometheus metrics of one application: requests counted as they pass, jobs and schedules read from the database."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from service import tables
from service.database import Database
from service.settings import Settings
from service.states import ACTIVE, STATES


class Metrics:
    """Its own registry, so that several applications in one process do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "evenkeel_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "evenkeel_http_request_seconds", "Time to answer.", ["method", "route"], registry=self.registry
        )
        self._jobs = Gauge("evenkeel_jobs", "Jobs by state.", ["state"], registry=self.registry)
        self._queue_wait = Gauge("evenkeel_queue_wait_seconds", "Age of the oldest queued job.", registry=self.registry)
        self._heartbeat = Gauge(
            "evenkeel_heartbeat_age_seconds", "Age of the oldest sign of life of an active run.", registry=self.registry
        )
        self._lag = Gauge(
            "evenkeel_scheduler_lag_seconds", "How late the latest due firing is.", registry=self.registry
        )
        self._damaged = Gauge(
            "evenkeel_store_damaged_versions",
            "Versions of a collection that this process found damaged and does not serve.",
            ["collection"],
            registry=self.registry,
        )
        self._disk = Gauge("evenkeel_disk_free_bytes", "Free space under EVENKEEL_HOME.", registry=self.registry)
        self.background_errors = Counter(
            "evenkeel_background_errors", "Failed rounds of a background task.", ["task"], registry=self.registry
        )

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    async def render(
        self, database: Database | None, settings: Settings, damaged: Mapping[str, Mapping[str, str]] | None = None
    ) -> bytes:
        """The text exposition, with gauges as of now; without a database, those of jobs and schedules stay at 0.
        ``damaged``: what ``Store.damaged`` says."""
        self._damaged.clear()
        for collection, versions in (damaged or {}).items():
            self._damaged.labels(collection).set(len(versions))
        if database is not None:
            await self._read(database)
        self._disk.set(shutil.disk_usage(settings.home).free)
        return generate_latest(self.registry)

    async def _read(self, database: Database) -> None:
        now = tables.now()
        job, schedule = tables.job.c, tables.schedule.c
        async with database.read() as connection:
            counted = await connection.execute(sa.select(job.state, sa.func.count()).group_by(job.state))
            counts = {row[0]: row[1] for row in counted}
            oldest = await connection.scalar(sa.select(sa.func.min(job.created_at)).where(job.state == "queued"))
            beat = await connection.scalar(sa.select(sa.func.min(job.heartbeat_at)).where(job.state.in_(ACTIVE)))
            due = await connection.scalar(
                sa.select(sa.func.min(schedule.next_fire_at)).where(schedule.paused.is_(False))
            )
        for state in STATES:
            self._jobs.labels(state).set(counts.get(state, 0))
        self._queue_wait.set(0 if oldest is None else (now - oldest).total_seconds())
        self._heartbeat.set(0 if beat is None else (now - beat).total_seconds())
        self._lag.set(0 if due is None else max(0.0, (now - due).total_seconds()))
