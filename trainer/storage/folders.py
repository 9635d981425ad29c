"""Folders of a storage that are there whole or not at all, though several hosts put their files.

    PREFIX/files/TOKEN/FILE     what was put, under a token of its own for each writing
    PREFIX/NAME.json            put last and only where there is none: the token, and each file with size and sha256

A folder is there once its record is. Files of a writing that was torn belong to no record: nobody reads them, and the
next writing under the prefix sweeps them. Two writers of one name do not touch each other's files, and one of them
alone gets the name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from embeddings.durable_files import temporary_beside
from trainer.storage.base import FileContent, MissingFileError, NotWholeError, RunStorage, content_of
from trainer.storage.cache import HostCache

RECORD_SUFFIX = ".json"
FILES = "files"
_TOKEN = re.compile("[0-9a-f]{32}")

FILES_AT_ONCE = 4


class StoredFolder(NamedTuple):
    """A folder that is there: who wrote it, and what it holds by path below it."""

    name: str
    token: str
    files: dict[str, FileContent]


def new_token() -> str:
    """Return a token for one writing."""
    return uuid.uuid4().hex


class Folders:
    """The folders below ``prefix`` of a storage."""

    def __init__(self, storage: RunStorage, prefix: str):
        self.storage = storage
        self.prefix = prefix

    def __str__(self) -> str:
        return f"{self.storage.uri}/{self.prefix}"

    def put(self, token: str, path: str, source: Path) -> None:
        """Put a file of the writing ``token``; any host may.

        Raises:
            StorageError: it could not be put.
        """
        self.storage.put_file(self._file(token, path), source)

    def commit(self, folder: StoredFolder) -> bool:
        """Make the folder appear under its name; return False if another has the name.

        Raises:
            NotWholeError: a file is not there with its size.
            StorageError: the record could not be put.
        """
        self._check_there(folder)
        document = {"token": folder.token, "files": {path: list(content) for path, content in folder.files.items()}}
        return self.storage.put_if_absent(self._record(folder.name), json.dumps(document, sort_keys=True).encode())

    def names(self) -> list[str]:
        """Return the names of the folders that are there."""
        start = len(self.prefix) + 1
        found = [one.name[start:] for one in self.storage.list(f"{self.prefix}/")]
        return [name.removesuffix(RECORD_SUFFIX) for name in found if "/" not in name and name.endswith(RECORD_SUFFIX)]

    def read(self, name: str) -> StoredFolder:
        """Return the content of a folder.

        Raises:
            MissingFileError: there is no folder of this name.
            NotWholeError: its record is damaged, or a file is not there with its size.
        """
        folder = self._record_of(name)
        if folder is None:
            raise NotWholeError(f"{self}/{name}{RECORD_SUFFIX} is not what was put there: remove it")
        self._check_there(folder)
        return folder

    def fetch(self, folder: StoredFolder, path: str, to: Path, cache: HostCache) -> None:
        """Make ``to`` a file of the folder, through the cache of this host (:meth:`HostCache.link`)."""
        cache.link(self.storage, self._file(folder.token, path), folder.files[path], to)

    def remove(self, name: str) -> None:
        """Remove a folder: first its record, then its files."""
        try:
            folder = self._record_of(name)
        except MissingFileError:
            return
        self.storage.delete([self._record(name)])
        if folder is not None:
            self.storage.delete([one.name for one in self.storage.list(f"{self.prefix}/{FILES}/{folder.token}/")])

    def sweep(self) -> None:
        """Remove the files of writings that are in no record. To be called by the only writer, before it writes."""
        records = [self._record_of(name) for name in self.names()]
        tokens = {folder.token for folder in records if folder is not None}
        start = f"{self.prefix}/{FILES}/"
        found = self.storage.list(start)
        self.storage.delete([one.name for one in found if one.name[len(start) :].partition("/")[0] not in tokens])

    def _record_of(self, name: str) -> StoredFolder | None:
        """Return the content of a record, None if it is none."""
        raw = self.storage.read(self._record(name))
        try:
            document = json.loads(raw)
            files = {str(path): FileContent(int(size), str(sha)) for path, (size, sha) in document["files"].items()}
            token = str(document["token"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        outside = any(Path(path).is_absolute() or ".." in Path(path).parts for path in files)
        return None if outside or not _TOKEN.fullmatch(token) else StoredFolder(name, token, files)

    def _check_there(self, folder: StoredFolder) -> None:
        start = f"{self.prefix}/{FILES}/{folder.token}/"
        there = {one.name[len(start) :]: one.num_bytes for one in self.storage.list(start)}
        for path, content in folder.files.items():
            if there.get(path) != content.num_bytes:
                found = f"holds {there[path]} bytes" if path in there else "is not there"
                raise NotWholeError(
                    f"{self.storage.uri}/{start}{path} {found}, {content.num_bytes} bytes were put: "
                    "use an earlier checkpoint, or run the job again"
                )

    def _file(self, token: str, path: str) -> str:
        return f"{self.prefix}/{FILES}/{token}/{path}"

    def _record(self, name: str) -> str:
        return f"{self.prefix}/{name}{RECORD_SUFFIX}"


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
    temporary, replaced = temporary_beside(directory), temporary_beside(directory)
    try:
        for parent in {(temporary / path).parent for path in folder.files}:
            parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(lambda path: folders.fetch(folder, path, temporary / path, cache), folder.files))
        if directory.exists():
            os.rename(directory, replaced)
        os.rename(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
