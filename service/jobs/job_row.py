"""A job's row in the database, and its form in the API."""

from __future__ import annotations

import datetime
from typing import Any, TypedDict

from pydantic import AwareDatetime, BaseModel

from service.jobs.states import State


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
    attempts: list[dict[str, Any]] | None
    failures: int
    home_id: str | None
    lease: str | None
    launched_at: datetime.datetime | None
    released: bool
    parent_version: str | None
    events_offset: int
    heartbeat_at: datetime.datetime | None
    preparation: dict[str, Any] | None
    progress: dict[str, Any] | None
    publication: dict[str, Any] | None
    error: dict[str, Any] | None
    needs: dict[str, Any] | None
    lineage: dict[str, Any] | None
    traceparent: str | None


class JobView(BaseModel):
    """A training job.

    ``reason``: why the job waits, or why it begins with fewer workers. ``attempts``: for each attempt the number of
    ``workers`` with which it began, and in ``because`` the reason if that is less than the job asks for.
    ``preparation``: progress of an attempt that has prepared data for more than a second, null otherwise. The progress
    has ``stage`` (``read``, then ``write``), ``rows`` done, ``total_rows`` (null if the files do not state it) and
    ``rows_per_second``. ``progress``, ``metrics`` and ``lineage`` come from the run's events. ``lineage`` has the
    fingerprint of the dataset, its ``drift`` and ``warnings``, hash of the spec, package versions, git commit, parent
    version, warm start. ``publication`` has ``status``, ``collection``, ``version``, ``reasons``, the ``gate``'s
    checks, and the ``comparison`` with the served version's model. If checks failed it has ``diagnosis``: ``cause``,
    ``summary``, ``advice``, the checks that ``failed`` (value, limit, ``times`` beyond it) and changes in the ``rows``.
    If held, it has ``held_in_a_row``, ``held_since`` and ``max_held``; ``released`` if it ends a series of held
    versions. ``needs``: the predicted resources of the job on its host; null until they are computed.
    """

    # A field with the name of a column of tables.job shows that column; job_records makes the others.
    id: str
    tenant: str
    name: str
    state: State
    reason: str | None
    created_at: AwareDatetime
    started_at: AwareDatetime | None
    finished_at: AwareDatetime | None
    attempt: int
    attempts: list[dict[str, Any]]
    preparation: dict[str, Any] | None
    progress: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    publication: dict[str, Any] | None
    error: dict[str, Any] | None
    dataset: str
    schedule: str | None
    parent_version: str | None
    needs: dict[str, Any] | None
    lineage: dict[str, Any] | None
    labels: dict[str, str]
    spec: dict[str, Any]
