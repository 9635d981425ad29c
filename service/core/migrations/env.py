"""Alembic's environment: the connection is the caller's, inside its transaction (see service.core.database.migrate)."""

from __future__ import annotations

from alembic import context

from service.core.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller holds the transaction
)
context.run_migrations()
