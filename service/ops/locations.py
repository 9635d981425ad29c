"""Checks of ``evenkeel doctor`` on the locations in the settings: data roots, database, feature store, run storage."""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from embeddings.store.backend_registry import open_store
from embeddings.store.files import StoreError
from service.core import modes
from service.core.database import Database, UrlError, parsed_url
from service.core.settings import Settings
from service.core.tenants import DEFAULT_TENANT
from service.jobs.executors.base import Check
from trainer.data.errors import DataError
from trainer.data.sources.locations import anything_at
from trainer.storage.base import StorageError
from trainer.storage.storage_registry import open_storage

DATABASE_SECONDS = 10.0


def check_locations() -> Iterator[Check]:
    """Check that this process can reach each location in the settings; their content is not examined."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        yield Check("data", "fail", str(error), "correct the variable that the message names")
        return
    yield from check_modes(settings)
    yield from check_data_roots(settings.for_tenant(DEFAULT_TENANT))
    yield from check_database(settings)
    yield from check_store(settings)
    yield from check_run_storage(settings)


def check_modes(settings: Settings) -> Iterator[Check]:
    """Check that other users can enter neither EVENKEEL_HOME nor the directory of the feature store."""
    for directory in {settings.home, Path(settings.store_url)}:
        inside = directory != settings.home and directory.is_relative_to(settings.home)
        if not inside and directory.is_dir() and modes.is_open(directory):
            message = f"{directory} can be read by other users of this machine"
            yield Check("modes", "fail", message, f"chmod -R go-rwx {directory}")


def check_data_roots(settings: Settings) -> Iterator[Check]:
    """Check that each root in EVENKEEL_DATA_ROOTS is a readable directory, or a prefix with objects in a bucket."""
    bad = [
        f"{directory} is not a directory that can be read"
        for directory in settings.data_roots
        if not os.path.isdir(directory) or not os.access(directory, os.R_OK | os.X_OK)
    ]
    empty = []
    for uri in settings.object_roots:
        try:
            if not anything_at(uri):
                empty.append(uri)
        except DataError as error:
            bad.append(str(error))
    if bad:
        yield Check(
            "data", "fail", f"data root {'; '.join(bad)}", "correct EVENKEEL_DATA_ROOTS, or `evenkeel roots remove DIR`"
        )
    elif empty:
        remedy = "put the data there, or correct EVENKEEL_DATA_ROOTS"
        yield Check("data", "warn", f"data root {', '.join(empty)}: no such bucket, or nothing is there", remedy)
    else:
        roots = (*map(str, settings.data_roots), *settings.object_roots)
        yield Check("data", "ok", f"data roots {', '.join(roots)}")


def check_database(settings: Settings) -> Iterator[Check]:
    """Check that PostgreSQL answers, if EVENKEEL_DATABASE_URL names such a server."""
    try:
        url = parsed_url(settings.database_url)
    except UrlError as error:
        yield Check("database", "fail", str(error), "correct EVENKEEL_DATABASE_URL")
        return
    if url.get_backend_name() == "sqlite":
        return
    shown = url.render_as_string(hide_password=True)

    async def answers() -> None:
        database = Database(settings.database_url)
        try:
            async with database.read():
                pass
        finally:
            await database.stop()

    try:
        asyncio.run(asyncio.wait_for(answers(), DATABASE_SECONDS))
    except Exception as error:  # errors of driver, network and server have no common class
        reason = str(error).splitlines()[0] if str(error) else f"no answer within {DATABASE_SECONDS:.0f} s"
        yield Check("database", "fail", f"{shown}: {reason}", "start the server, or correct EVENKEEL_DATABASE_URL")
    else:
        yield Check("database", "ok", f"{shown} answers")


def check_store(settings: Settings) -> Iterator[Check]:
    """Check that the feature store's server answers, if EVENKEEL_STORE_URL names a server."""
    try:
        store = open_store(settings.store_url)
        if not store.is_remote:
            return
        store.reach()
    except (StoreError, ValueError) as error:
        yield Check("store", "fail", str(error), "start the server, or correct EVENKEEL_STORE_URL")
    else:
        yield Check("store", "ok", f"{store.url} answers")


def check_run_storage(settings: Settings) -> Iterator[Check]:
    """Check that a file can be written to EVENKEEL_RUN_STORAGE, read, and deleted."""
    if not settings.stored_runs:
        return
    assert settings.run_storage is not None
    name = f"doctor-{uuid.uuid4().hex}"
    try:
        storage = open_storage(settings.run_storage)
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, name)
            probe.write_bytes(name.encode())
            storage.put_file(name, probe)
            whole = storage.read(name) == name.encode()
            storage.delete([name])
    except (StorageError, ValueError) as error:
        yield Check(
            "storage", "fail", f"{settings.run_storage}: {error}", "correct EVENKEEL_RUN_STORAGE, or its credentials"
        )
        return
    if whole:
        yield Check("storage", "ok", f"{settings.run_storage} stores and returns files")
    else:
        yield Check(
            "storage", "fail", f"{settings.run_storage} returns other bytes than were written", "use another storage"
        )
