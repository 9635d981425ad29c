"""First schema: keys, sessions, datasets, jobs, schedules.

Revision 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.core.tables import UtcTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("expires_at", UtcTime(), nullable=True),
        sa.Column("revoked_at", UtcTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("prefix", name=op.f("uq_api_key_prefix")),
    )
    op.create_table(
        "dataset",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_dataset")),
    )
    op.create_table(
        "idempotency",
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_table(
        "job",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("dataset_spec", sa.JSON(), nullable=False),
        sa.Column("schedule_id", sa.String(length=64), nullable=True),
        sa.Column("schedule", sa.String(length=63), nullable=True),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("started_at", UtcTime(), nullable=True),
        sa.Column("finished_at", UtcTime(), nullable=True),
        sa.Column("not_before", UtcTime(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("home_id", sa.String(length=64), nullable=True),
        sa.Column("lease", sa.String(length=64), nullable=True),
        sa.Column("launched_at", UtcTime(), nullable=True),
        sa.Column("released", sa.Boolean(), nullable=False),
        sa.Column("parent_version", sa.String(length=64), nullable=True),
        sa.Column("events_offset", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", UtcTime(), nullable=True),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("publication", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
    )
    op.create_index(op.f("ix_job_home_id"), "job", ["home_id"], unique=False)
    op.create_index(op.f("ix_job_name"), "job", ["name"], unique=False)
    op.create_index(op.f("ix_job_schedule_id"), "job", ["schedule_id"], unique=False)
    op.create_index(op.f("ix_job_state"), "job", ["state"], unique=False)
    op.create_table(
        "schedule",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("cron", sa.String(length=255), nullable=False),
        sa.Column("timezone", sa.String(length=64), nullable=False),
        sa.Column("job", sa.JSON(), nullable=False),
        sa.Column("catchup", sa.String(length=8), nullable=False),
        sa.Column("misfire_grace_seconds", sa.Float(), nullable=False),
        sa.Column("overlap", sa.String(length=8), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("next_fire_at", UtcTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_schedule")),
        sa.UniqueConstraint("name", name=op.f("uq_schedule_name")),
    )
    op.create_index(op.f("ix_schedule_next_fire_at"), "schedule", ["next_fire_at"], unique=False)
    op.create_table(
        "firing",
        sa.Column("schedule_id", sa.String(length=64), nullable=False),
        sa.Column("fire_at_utc", UtcTime(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("outcome", sa.String(length=8), nullable=False),
        sa.Column("firing_date", sa.String(length=10), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["schedule_id"], ["schedule.id"], name=op.f("fk_firing_schedule_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("schedule_id", "fire_at_utc", name=op.f("pk_firing")),
    )
    op.create_table(
        "job_event",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_event_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_event")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_job_event_job_id_id"), "job_event", ["job_id", "id"], unique=False)
    op.create_table(
        "job_label",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("value", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_label_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_job_label")),
    )
    op.create_index(op.f("ix_job_label_key_value"), "job_label", ["key", "value"], unique=False)
    op.create_table(
        "job_metric",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("split", sa.String(length=16), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_job_metric_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "epoch", "split", name=op.f("pk_job_metric")),
    )
    op.create_table(
        "session",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("expires_at", UtcTime(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"], name=op.f("fk_session_key_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_session")),
    )


def downgrade() -> None:
    op.drop_table("session")
    op.drop_table("job_metric")
    op.drop_index(op.f("ix_job_label_key_value"), table_name="job_label")
    op.drop_table("job_label")
    op.drop_index(op.f("ix_job_event_job_id_id"), table_name="job_event")
    op.drop_table("job_event")
    op.drop_table("firing")
    op.drop_index(op.f("ix_schedule_next_fire_at"), table_name="schedule")
    op.drop_table("schedule")
    op.drop_index(op.f("ix_job_state"), table_name="job")
    op.drop_index(op.f("ix_job_schedule_id"), table_name="job")
    op.drop_index(op.f("ix_job_name"), table_name="job")
    op.drop_index(op.f("ix_job_home_id"), table_name="job")
    op.drop_table("job")
    op.drop_table("idempotency")
    op.drop_table("dataset")
    op.drop_table("api_key")
