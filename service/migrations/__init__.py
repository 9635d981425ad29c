"""Alembic: ``env.py`` and one file per revision in ``versions/``. :func:`service.database.migrate` runs them."""
