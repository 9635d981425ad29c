"""Directories in a run storage: put and fetched as a whole, several files at once."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from embeddings.durable_files import temporary_beside
from trainer.storage.cache import HostCache
from trainer.storage.content import content_of
from trainer.storage.folders import Folders, StoredFolder, new_token

FILES_AT_ONCE = 4


def put_tree(folders: Folders, name: str, directory: Path, cache: HostCache | None) -> None:
    """Put every file below ``directory`` as the folder ``name``, unless there is one; keep them in the cache, if any.

    Raises:
        StorageError: the storage is away; the folder is not there then.
    """
    token = new_token()
    paths = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())

    def put(path: str) -> None:
        folders.put(token, path, directory / path)
        if cache is not None:
            cache.adopt(directory / path, contents[path])

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        contents = dict(zip(paths, pool.map(lambda path: content_of(directory / path), paths), strict=True))
        list(pool.map(put, paths))
    folders.commit(StoredFolder(name, token, contents))


def fetch_tree(folders: Folders, name: str, directory: Path, cache: HostCache) -> None:
    """Make ``directory`` the folder ``name``, in one step; what was there is replaced. For one process at a time.

    Raises:
        MissingFileError: there is no such folder.
        StorageError: the storage is away, or a file is not what was put.
    """
    folder = folders.read(name)
    place, replaced = temporary_beside(directory), temporary_beside(directory)
    try:
        for parent in {(place / path).parent for path in folder.files}:
            parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(lambda path: folders.fetch(folder, path, place / path, cache), folder.files))
        if directory.exists():
            os.rename(directory, replaced)
        os.rename(place, directory)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
