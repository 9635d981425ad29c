"""Files of runs in a run storage, as the service sees them: their location and removal. Blocking."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from trainer.runs.directory import RUN_FILE
from trainer.storage.base import StorageError
from trainer.storage.storage_registry import open_storage

log = logging.getLogger("evenkeel.jobs")


def storage_of(run_dir: Path) -> str | None:
    """Return the URI of the run's files in a run storage; None where all of them are in a directory."""
    try:
        storage = json.loads((run_dir / RUN_FILE).read_text("utf-8")).get("storage")
    except (OSError, ValueError, AttributeError):
        return None
    return storage if isinstance(storage, str) else None


def num_bytes(run_dir: Path, prefix: str = "") -> int:
    """Return the size of what the run's storage holds below ``prefix``, 0 without one.

    Raises:
        StorageError: it is away.
    """
    storage = storage_of(run_dir)
    return 0 if storage is None else sum(file.num_bytes for file in open_storage(storage).list(prefix))


def remove_stored(run_dir: Path, prefix: str = "") -> None:
    """Remove what the run's storage holds below ``prefix``; nothing without one.

    Raises:
        StorageError: it is away.
    """
    storage = storage_of(run_dir)
    if storage is not None:
        files = open_storage(storage)
        files.delete([file.name for file in files.list(prefix)])


def remove_run(directory: Path) -> None:
    """Remove a run's directory and what its storage holds; while that is away both stay, for the next start."""
    try:
        remove_stored(directory)
    except StorageError as error:
        log.warning("%s is kept until the next start, for its run storage could not be emptied: %s", directory, error)
        return
    shutil.rmtree(directory, ignore_errors=True)
