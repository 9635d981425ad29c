"""Resources that a job needs, the lineage of its run, and stored responses for repeated Idempotency-Keys.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = (("job", "needs"), ("job", "lineage"), ("idempotency", "answer"))


def upgrade() -> None:
    for table, column in COLUMNS:
        op.add_column(table, sa.Column(column, sa.JSON(), nullable=True))


def downgrade() -> None:
    # Older versions would take a stored response without a job for a request in flight.
    op.execute("DELETE FROM idempotency WHERE job_id IS NULL")
    for table, column in reversed(COLUMNS):
        op.drop_column(table, column)
