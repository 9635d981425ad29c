"""Time at which each daily sweep last began.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.core.tables import UtcTime

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sweep",
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("began_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_sweep")),
    )


def downgrade() -> None:
    op.drop_table("sweep")
