"""A job as the database has it, and as the API shows it."""

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

    ``reason``: why it is waiting, or begins with fewer workers. ``attempts``: with how many ``workers`` each began, and
    ``because`` of what with fewer than the job asks for. ``preparation``: how far an attempt is that prepares its data
    for more than a second, null otherwise: ``stage`` (``read``, then ``write``), the ``rows`` of ``total_rows`` (null
    where the files do not say) that it has done, ``rows_per_second``. ``progress`` and ``metrics`` come from the run's
    own events, and so does ``lineage``: fingerprint of the dataset, its ``drift`` and ``warnings``, hash of the spec,
    package versions, git commit, parent version, warm start. ``publication``: ``status``, ``collection``, ``version``,
    ``reasons`` and the ``gate``'s checks; of what failed a ``diagnosis`` (``cause``, ``summary``, ``advice``, what
    ``failed`` with value, limit and how many ``times`` it is beyond, what of the ``rows`` moved); if it is held
    ``held_in_a_row``, ``held_since`` and ``max_held``; ``released`` where it ends a row of held ones; the
    ``comparison`` with the served version's model. ``needs``: the resources it is predicted to use on its host, once
    they have been computed.
    """

    # A field named like a column of tables.job shows it; job_records has what the others show.
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
