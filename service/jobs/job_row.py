"""The type of a job's row, by which its columns are named and checked wherever it goes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, TypedDict, cast


class JobRow(TypedDict):
    """A row of ``tables.job``, whose comments say what each column is."""

    id: str
    tenant: str
    name: str
    state: str
    reason: str | None
    spec: dict[str, Any]
    dataset_spec: dict[str, Any]
    schedule_id: str | None
    schedule: str | None
    created_at: datetime.datetime
    started_at: datetime.datetime | None
    finished_at: datetime.datetime | None
    not_before: datetime.datetime | None
    attempt: int
    failures: int
    home_id: str | None
    lease: str | None
    launched_at: datetime.datetime | None
    released: bool
    parent_version: str | None
    events_offset: int
    heartbeat_at: datetime.datetime | None
    progress: dict[str, Any] | None
    publication: dict[str, Any] | None
    error: dict[str, Any] | None
    needs: dict[str, Any] | None
    lineage: dict[str, Any] | None
    traceparent: str | None


def as_job(row: Mapping[Any, Any]) -> JobRow:
    """Return what a query of all columns of ``tables.job`` found as a row of its own, which may be changed."""
    return cast(JobRow, dict(row))
