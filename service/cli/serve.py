"""CLI commands that need the service's own code instead of a request to it: serve, reset-admin, retention."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli import output
from service.cli.output import CommandError

if TYPE_CHECKING:
    from service.core.settings import Settings
    from service.jobs.executors.base import Placement

_SETTINGS_REMEDY = "see the EVENKEEL_ variables in service/core/environment.py"
_PLACES_REMEDY = "set EVENKEEL_HOME and EVENKEEL_DATABASE_URL as for `evenkeel serve`"


def serve(role: str, host: str, port: int, num_workers: int = 1) -> int:
    """Run the service until a signal stops it, and return the exit code.

    Raises:
        CommandError: The role does not exist, or several workers were requested for a role that allows only one worker.
    """
    from service.core.settings import ROLES

    if role not in ROLES:
        raise CommandError(f"--role {role}: no such role", f"one of {', '.join(ROLES)}", output.USAGE)
    if num_workers > 1 and role != "vectors":
        raise CommandError(
            f"--workers {num_workers} with --role {role}: only one process may manage jobs",
            "serve vectors separately: --role vectors --workers N",
            output.USAGE,
        )
    gc.disable()  # app.serve enables it when the service is ready: each collection would search all modules
    try:
        from service import app

        placement()
        return app.serve(read_settings(), host, port, role, num_workers=num_workers)  # type: ignore[arg-type]
    finally:
        gc.enable()


def reset_admin() -> Path:
    """Replace the admin key and return the file that holds the new key.

    Raises:
        CommandError: A setting is wrong, the database or the file cannot be used, or a newer version of Evenkeel wrote
            the database.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from service.core.database import SchemaError
    from service.identity.auth import AWAY
    from service.identity.keys import reset_admin as reset

    settings = read_settings()
    try:
        asyncio.run(reset(settings))
    except SchemaError as error:
        raise CommandError(str(error)) from None
    except (*AWAY, SQLAlchemyError) as error:
        raise CommandError(f"keys reset-admin: {str(error).splitlines()[0]}", _PLACES_REMEDY) from None
    return settings.admin_key_file


def read_settings() -> Settings:
    """Return the settings of this process's environment.

    Raises:
        CommandError: A setting is wrong.
    """
    from service.core.settings import Settings

    try:
        return Settings.from_environment()
    except ValueError as error:
        raise CommandError(str(error), _SETTINGS_REMEDY, output.USAGE) from None


def placement() -> Placement:
    """Return the placement of the service's runs, determined by its settings.

    Raises:
        CommandError: A setting is wrong.
    """
    from service.jobs.executors.registry import placement_of

    try:
        return placement_of(read_settings())
    except ValueError as error:
        raise CommandError(str(error), _SETTINGS_REMEDY, output.USAGE) from None


def sweep(dry_run: bool) -> dict[str, int]:
    """Return the number of removed items by kind; in a dry run, the number of items that would be removed.

    Raises:
        CommandError: A setting is wrong, the database, the files or the feature store cannot be read, or another
            version of Evenkeel wrote the database.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from embeddings.store import StoreError, open_store
    from service.core import tables
    from service.core.database import Database, SchemaError
    from service.identity.auth import AWAY
    from service.ops import retention

    settings = read_settings()

    async def swept() -> retention.Swept:
        database = Database(settings.database_url)
        try:
            await database.require_newest()
            return await retention.sweep(database, settings, open_store(settings.store_url), tables.now(), dry_run)
        finally:
            await database.stop()

    try:
        return asyncio.run(swept())._asdict()
    except SchemaError as error:
        raise CommandError(f"retention: {error}") from None
    except (*AWAY, SQLAlchemyError, StoreError) as error:
        remedy = f"nothing was removed that could be needed; {_PLACES_REMEDY}"
        raise CommandError(f"retention: {str(error).splitlines()[0]}", remedy) from None
