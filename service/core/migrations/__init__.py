"""Alembic: ``env.py`` and one file per revision in ``versions/``. :func:`service.core.database.migrate` runs them."""
