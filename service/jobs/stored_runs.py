"""Files of runs in a run storage, as the service sees them: their location and removal. Blocking."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from service.jobs.executors.base import read_record
from trainer.runs.directory import RUN_FILE
from trainer.storage.base import StorageError
from trainer.storage.storage_registry import open_storage

log = logging.getLogger("evenkeel.jobs")


def storage_of(run_dir: Path) -> str | None:
    """Return the URI of the run's files in a run storage; None if all of them are in a directory."""
    storage = read_record(run_dir / RUN_FILE).get("storage")
    return storage if isinstance(storage, str) else None


def num_bytes(run_dir: Path, prefix: str = "") -> int:
    """Return the total size of the run's files below ``prefix`` in its run storage; 0 without a run storage.

    Raises:
        StorageError: The storage does not answer.
    """
    storage = storage_of(run_dir)
    return 0 if storage is None else sum(file.num_bytes for file in open_storage(storage).list(prefix))


def remove_stored(run_dir: Path, prefix: str = "") -> None:
    """Remove the run's files below ``prefix`` from its run storage; does nothing without a run storage.

    Raises:
        StorageError: The storage does not answer.
    """
    storage = storage_of(run_dir)
    if storage is not None:
        files = open_storage(storage)
        files.delete([file.name for file in files.list(prefix)])


def remove_run(directory: Path) -> None:
    """Remove a run's directory and its files in the run storage; if that is down, both stay until the next start."""
    try:
        remove_stored(directory)
    except StorageError as error:
        kept = "%s is kept until the next start, because its files in the run storage could not be removed: %s"
        log.warning(kept, directory, error)
        return
    shutil.rmtree(directory, ignore_errors=True)
