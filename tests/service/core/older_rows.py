"""Rows of databases that older code wrote, as SQL: nothing here changes when the tables do."""

from __future__ import annotations

import hashlib
import json
from typing import Any

KEY = "ek_0a1b2c3d_the-secret-of-a-key-of-before"
AT = "2026-11-20 03:00:00.000000"
FIRST = "0008"
"""The revision of release 0.1.0."""

DATASET = {
    "name": "clicks",
    "uri": "/data/clicks.parquet",
    "features": {"user": {"type": "id"}, "item": {"type": "id"}},
    "label": {"column": "click"},
}
JOB = {
    "name": "daily",
    "dataset": {"name": "clicks"},
    "model": {"kind": "two_tower", "embedding_dim": 8},
    "optimizer": {"kind": "adam_ar", "alpha": "auto"},
    "publish": {
        "collection": "items",
        "feature": "item",
        "compass": {"items": "warm"},
        "gate": {"calibrate": "off", "calibrate_seconds": 60.0},
    },
    "init_from": {"job": "job_1"},
    "labels": {"team": "ads"},
}
"""A stored job with one renamed field, two removed fields, one removed value and no decay."""


def of_each_table(postgres: bool) -> list[str]:
    """A row in each table of FIRST but ``sweep``."""
    at = AT + "+00" if postgres else AT
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    return [
        _insert("api_key", id="key_1", name="admin", prefix="0a1b2c3d", hash=hashed, scopes=["admin"], created_at=at),
        _insert("session", hash="s", key_id="key_1", created_at=at, expires_at=at),
        _insert("dataset", name="clicks", spec=DATASET, created_at=at),
        _insert(
            "job", id="job_1", name="daily", state="succeeded", spec=JOB, dataset_spec=DATASET, created_at=at,
            started_at=at, finished_at=at, schedule_id="schedule_1", schedule="nightly", attempt=1, failures=0,
            released=True, events_offset=7, progress={"epoch": 2, "epochs": 2},
            publication={"status": "published", "collection": "items", "version": "v000001", "reasons": []},
        ),
        _insert("job_label", job_id="job_1", key="team", value="ads"),
        _insert("job_metric", job_id="job_1", epoch=2, split="test", values={"auc": 0.75}),
        _insert("job_event", job_id="job_1", type="state", data={"state": "succeeded"}),
        _insert("idempotency", key_id="key_1", key="once", body_hash="h", token="t", job_id="job_1", created_at=at),
        _insert(
            "schedule", id="schedule_1", name="nightly", cron="0 3 * * *", timezone="UTC", job=JOB, catchup="none",
            misfire_grace_seconds=60.0, overlap="forbid", paused=True, created_at=at,
        ),
        _insert(
            "firing", schedule_id="schedule_1", fire_at_utc=at, kind="cron", outcome="started", created_at=at,
            firing_date="2026-11-20", job_id="job_1",
        ),
        _insert(
            "audit", id="audit_1", at=at, tenant="default", key_id="key_1", key_name="admin", action="job.create",
            object="job_1", status=202, address="127.0.0.1",
        ),
        _insert(
            "webhook", id="webhook_1", tenant="default", url="https://ops.example.com/evenkeel", secret="whsec_x",
            events=["job.failed"], paused=False, created_at=at,
        ),
        _insert(
            "webhook_delivery", id="delivery_1", webhook_id="webhook_1", event="job.failed", payload={"type": "x"},
            created_at=at, attempt=1, delivered_at=at, status=200,
        ),
    ]  # fmt: skip


def _insert(table: str, /, **values: Any) -> str:
    columns = ", ".join(f'"{name}"' for name in values)
    return f"INSERT INTO {table} ({columns}) VALUES ({', '.join(map(_literal, values.values()))})"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text.replace("'", "''") + "'"
