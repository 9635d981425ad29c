"""The schema of release 0.1.0, the first.

Revision ID: 0008
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from service.core.tables import UtcTime

revision = "0008"
down_revision = None

TENANT: dict[str, Any] = {"nullable": False, "server_default": "default"}


def upgrade() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False, unique=True),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Column("expires_at", UtcTime),
        sa.Column("revoked_at", UtcTime),
        sa.Column("tenant", sa.String(63), **TENANT),
        sa.Column("old_prefix", sa.String(16)),
        sa.Column("old_hash", sa.String(64)),
        sa.Column("old_until", UtcTime),
        sa.Column("rotated_at", UtcTime),
        sa.Index(None, "old_prefix", unique=True),
    )
    op.create_table(
        "session",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(64), sa.ForeignKey("api_key.id", ondelete="CASCADE"), nullable=False),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Column("expires_at", UtcTime, nullable=False),
    )
    op.create_table(
        "dataset",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Column("tenant", sa.String(63), **TENANT),
        sa.PrimaryKeyConstraint("tenant", "name"),
    )
    op.create_table(
        "idempotency",
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Column("answer", sa.JSON),
    )
    op.create_table(
        "job",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False, index=True),
        sa.Column("state", sa.String(16), nullable=False, index=True),
        sa.Column("reason", sa.Text),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("dataset_spec", sa.JSON, nullable=False),
        sa.Column("schedule_id", sa.String(64), index=True),
        sa.Column("schedule", sa.String(63)),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Column("started_at", UtcTime),
        sa.Column("finished_at", UtcTime),
        sa.Column("not_before", UtcTime),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("home_id", sa.String(64), index=True),
        sa.Column("lease", sa.String(64)),
        sa.Column("launched_at", UtcTime),
        sa.Column("released", sa.Boolean, nullable=False),
        sa.Column("parent_version", sa.String(64)),
        sa.Column("events_offset", sa.BigInteger, nullable=False),
        sa.Column("heartbeat_at", UtcTime),
        sa.Column("progress", sa.JSON),
        sa.Column("publication", sa.JSON),
        sa.Column("error", sa.JSON),
        sa.Column("tenant", sa.String(63), **TENANT),
        sa.Column("needs", sa.JSON),
        sa.Column("lineage", sa.JSON),
        sa.Column("traceparent", sa.String(55)),
        sa.Column("attempts", sa.JSON),
        sa.Column("preparation", sa.JSON),
        sa.Index(None, "tenant", "id"),
    )
    op.create_table(
        "job_event",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.String(64), sa.ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Index(None, "job_id", "id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "job_label",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.String(63), primary_key=True),
        sa.Column("value", sa.String(255), nullable=False),
        sa.Index(None, "key", "value"),
    )
    op.create_table(
        "job_metric",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True),
        sa.Column("split", sa.String(16), primary_key=True),
        sa.Column("values", sa.JSON, nullable=False),
    )
    op.create_table(
        "schedule",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("cron", sa.String(255), nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("job", sa.JSON, nullable=False),
        sa.Column("catchup", sa.String(8), nullable=False),
        sa.Column("misfire_grace_seconds", sa.Float, nullable=False),
        sa.Column("overlap", sa.String(8), nullable=False),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Column("next_fire_at", UtcTime, index=True),
        sa.Column("tenant", sa.String(63), **TENANT),
        sa.UniqueConstraint("tenant", "name"),
    )
    op.create_table(
        "firing",
        sa.Column("schedule_id", sa.String(64), sa.ForeignKey("schedule.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("fire_at_utc", UtcTime, primary_key=True),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("firing_date", sa.String(10), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("reason", sa.Text),
        sa.Column("created_at", UtcTime, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("at", UtcTime, nullable=False, index=True),
        sa.Column("tenant", sa.String(63), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("key_name", sa.String(63), nullable=False),
        sa.Column("action", sa.String(128), nullable=False),
        sa.Column("object", sa.String(255), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Index(None, "tenant", "id"),
    )
    op.create_table(
        "webhook",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(63), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("events", sa.JSON, nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Index(None, "tenant", "id"),
    )
    own_webhook = sa.ForeignKey("webhook.id", name="fk_webhook_delivery_webhook_id_webhook", ondelete="CASCADE")
    op.create_table(
        "webhook_delivery",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("webhook_id", sa.String(64), own_webhook, nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("payload", sa.JSON, nullable=False),
        sa.Column("created_at", UtcTime, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("next_at", UtcTime, index=True),
        sa.Column("delivered_at", UtcTime),
        sa.Column("status", sa.Integer),
        sa.Column("error", sa.Text),
        sa.Index(None, "webhook_id", "id"),
    )
    op.create_table(
        "sweep",
        sa.Column("name", sa.String(80), primary_key=True),
        sa.Column("began_at", UtcTime, nullable=False),
    )
