"""Types of the database's rows, one per table, from which mypy knows their columns.

The type of a job's row is in service/jobs/job_row.py. A test checks each type against its table: names of columns, and
which of them may be null.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

Row = TypeVar("Row")
Catchup = Literal["none", "last", "all"]
Overlap = Literal["forbid", "queue", "replace"]
Outcome = Literal["started", "skipped", "missed", "failed"]


class KeyRow(TypedDict):
    """A row of ``tables.api_key``."""

    id: str
    tenant: str
    name: str
    prefix: str
    hash: str
    scopes: list[str]
    created_at: datetime.datetime
    expires_at: datetime.datetime | None
    revoked_at: datetime.datetime | None
    rotated_at: datetime.datetime | None
    old_prefix: str | None
    old_hash: str | None
    old_until: datetime.datetime | None


class DatasetRow(TypedDict):
    tenant: str
    name: str
    spec: dict[str, Any]
    created_at: datetime.datetime


class ScheduleRow(TypedDict):
    id: str
    tenant: str
    name: str
    cron: str
    timezone: str
    job: dict[str, Any]
    catchup: Catchup
    misfire_grace_seconds: float
    overlap: Overlap
    paused: bool
    created_at: datetime.datetime
    next_fire_at: datetime.datetime | None


class FiringRow(TypedDict):
    schedule_id: str
    fire_at_utc: datetime.datetime
    kind: Literal["cron", "trigger"]
    outcome: Outcome
    firing_date: str
    job_id: str | None
    reason: str | None
    created_at: datetime.datetime


class FiredRow(FiringRow):
    """A firing with its job's state and publication, which are None if it started no job or the job was deleted."""

    job_state: str | None
    publication: dict[str, Any] | None


class AuditRow(TypedDict):
    id: str
    at: datetime.datetime
    tenant: str
    key_id: str
    key_name: str
    action: str
    object: str
    status: int
    address: str


class WebhookRow(TypedDict):
    id: str
    tenant: str
    url: str
    events: list[str]
    secret: str
    paused: bool
    reason: str | None
    created_at: datetime.datetime


class DeliveryRow(TypedDict):
    """A row of ``tables.webhook_delivery``."""

    id: str
    webhook_id: str
    event: str
    payload: dict[str, Any]
    created_at: datetime.datetime
    attempt: int
    next_at: datetime.datetime | None
    delivered_at: datetime.datetime | None
    status: int | None
    error: str | None


def as_row(kind: type[Row], columns: Mapping[Any, Any]) -> Row:
    """Return a copy of ``columns``, which the caller may change, as a row of type ``kind``."""
    return cast(Row, dict(columns))


async def first_row(
    connection: AsyncConnection, kind: type[Row], query: sa.Select[Any], values: Mapping[str, Any] | None = None
) -> Row | None:
    """Return the first row of a query, or None if the query returns no row.

    ``values`` are the query's parameters, keyed by name.
    """
    columns = (await connection.execute(query, values)).mappings().first()
    return None if columns is None else as_row(kind, columns)


async def all_rows(connection: AsyncConnection, kind: type[Row], query: sa.Select[Any]) -> list[Row]:
    """Return every row of a query, of type ``kind``."""
    return [as_row(kind, columns) for columns in (await connection.execute(query)).mappings()]
