"""Exchange of prepared data through a run's storage, in one folder whose name is the data's fingerprint. Torch-free."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from trainer.data.batches.prepared import PreparedData
from trainer.storage.cache import cache_of_host
from trainer.storage.folders import Folders, fetch_tree, put_tree


def put_prepared(folders: Folders | None, directory: Path) -> None:
    """Put the prepared data of ``directory`` into the run's storage, for ranks on other hosts, instead of older data.

    Raises:
        StorageError: the storage does not answer.
    """
    if folders is None:
        return
    fingerprint = PreparedData.fingerprint_of(directory)
    assert fingerprint is not None
    for name in folders.names():
        if name != fingerprint:
            folders.remove(name)
    if fingerprint not in folders.names():
        folders.sweep()
        put_tree(folders, fingerprint, directory, cache_of_host())


def fetch_prepared(folders: Folders | None, directory: Path) -> None:
    """Fetch the run's prepared data into ``directory``, if the run's storage has the data.

    One process of a host fetches them; the others wait.

    Raises:
        StorageError: the storage does not answer, or the data in it are damaged.
    """
    if folders is None:
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in folders.names():
            if PreparedData.fingerprint_of(directory) != name:
                fetch_tree(folders, name, directory, cache_of_host())
    finally:
        os.close(lock)
