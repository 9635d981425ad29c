"""Tenants, rotation of keys, the audit log.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.core.tables import UtcTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OWNED = ("api_key", "dataset", "job", "schedule")
DEFAULT = "default"


def upgrade() -> None:
    for table in OWNED:
        op.add_column(table, sa.Column("tenant", sa.String(length=63), nullable=False, server_default=DEFAULT))
    op.create_index(op.f("ix_job_tenant_id"), "job", ["tenant", "id"], unique=False)
    _rename_keys(["tenant", "name"], "uq_schedule_name", op.f("uq_schedule_tenant_name"))
    op.add_column("api_key", sa.Column("old_prefix", sa.String(length=16), nullable=True))
    op.add_column("api_key", sa.Column("old_hash", sa.String(length=64), nullable=True))
    op.add_column("api_key", sa.Column("old_until", UtcTime(), nullable=True))
    op.add_column("api_key", sa.Column("rotated_at", UtcTime(), nullable=True))
    op.create_index(op.f("ix_api_key_old_prefix"), "api_key", ["old_prefix"], unique=True)
    op.create_table(
        "audit",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("at", UtcTime(), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("key_name", sa.String(length=63), nullable=False),
        sa.Column("action", sa.String(length=128), nullable=False),
        sa.Column("object", sa.String(length=255), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_tenant_id"), "audit", ["tenant", "id"], unique=False)
    op.create_index(op.f("ix_audit_at"), "audit", ["at"], unique=False)


def downgrade() -> None:
    connection = op.get_bind()
    for table in OWNED:
        owner: sa.ColumnClause[str] = sa.column("tenant")
        other = connection.scalar(sa.select(owner).select_from(sa.table(table)).where(owner != DEFAULT).limit(1))
        if other is not None:
            raise RuntimeError(
                f"tenant '{other}' has rows in {table}, which an older version would give to everyone: remove its "
                "keys, jobs, schedules and datasets first"
            )
    op.drop_index(op.f("ix_audit_at"), table_name="audit")
    op.drop_index(op.f("ix_audit_tenant_id"), table_name="audit")
    op.drop_table("audit")
    op.drop_index(op.f("ix_api_key_old_prefix"), table_name="api_key")
    for column in ("rotated_at", "old_until", "old_hash", "old_prefix"):
        op.drop_column("api_key", column)
    _rename_keys(["name"], op.f("uq_schedule_tenant_name"), "uq_schedule_name")
    op.drop_index(op.f("ix_job_tenant_id"), table_name="job")
    for table in OWNED:
        op.drop_column(table, "tenant")


def _rename_keys(columns: list[str], before: str, after: str) -> None:
    """Replace the unique columns ``before`` of datasets and schedules by ``after``.

    SQLite creates such a table anew. Dropping the old table of schedules would also delete the firings, so these are
    copied aside first.
    """
    sqlite = op.get_bind().dialect.name == "sqlite"
    if sqlite:
        op.execute("CREATE TEMPORARY TABLE firing_kept AS SELECT * FROM firing")
    with op.batch_alter_table("dataset") as batch:
        batch.drop_constraint("pk_dataset", type_="primary")
        batch.create_primary_key("pk_dataset", columns)
    with op.batch_alter_table("schedule") as batch:
        batch.drop_constraint(before, type_="unique")
        batch.create_unique_constraint(after, columns)
    if sqlite:
        op.execute("INSERT INTO firing SELECT * FROM firing_kept WHERE NOT EXISTS (SELECT 1 FROM firing)")
        op.execute("DROP TABLE firing_kept")
