"""Stored jobs and schedules without ``optimizer.decay`` get ``at_read``, which was its default.

``alpha: auto``, which was removed, becomes ``default``.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    connection = op.get_bind()
    for name, column in (("job", "spec"), ("schedule", "job")):
        table = sa.table(name, sa.column("id"), sa.column(column, sa.JSON()))
        decay, alpha = (table.c[column]["optimizer", field].as_string() for field in ("decay", "alpha"))
        query = sa.select(table).where(sa.or_(decay.is_(None), alpha == "auto"))
        for row_id, document in connection.execute(query).all():
            optimizer = {"decay": "at_read", **document.get("optimizer", {})}
            if optimizer.get("alpha") == "auto":
                optimizer["alpha"] = "default"
            change = table.update().where(table.c.id == row_id)
            connection.execute(change.values({column: {**document, "optimizer": optimizer}}))
