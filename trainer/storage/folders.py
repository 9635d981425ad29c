"""Folders of a storage that exist whole or not at all, although several hosts put their files.

    PREFIX/files/TOKEN/FILE     the files of one writing, which has its own random token
    PREFIX/NAME.json            the record, put last and only if there is none: token, and size and sha256 of each file

A folder exists once its record does. Files of an interrupted writing belong to no record: nobody reads them, and the
next writer under the prefix may remove them (:meth:`Folders.sweep`). Two writers of one name do not touch each other's
files, and only one of them gets the name.
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
    """A folder of a storage: its name, the token of the writing that made it, and its files by relative path."""

    name: str
    token: str
    files: dict[str, FileContent]


def new_token() -> str:
    """Return a new random token, 32 hexadecimal digits, for one writing of a folder."""
    return uuid.uuid4().hex


class Folders:
    """The folders below ``prefix`` of a storage."""

    def __init__(self, storage: RunStorage, prefix: str):
        self.storage = storage
        self.prefix = prefix

    def __str__(self) -> str:
        return f"{self.storage.uri}/{self.prefix}"

    def put(self, token: str, path: str, source: Path) -> None:
        """Put the local file ``source`` at the relative ``path`` of the writing ``token``. Any host may call this.

        Raises:
            StorageError: the file could not be put.
        """
        self.storage.put_file(self._file(token, path), source)

    def commit(self, folder: StoredFolder) -> bool:
        """Make the folder appear under its name; return False if another folder has the name.

        Raises:
            NotWholeError: a file is missing from the storage or has another size.
            StorageError: the record could not be put.
        """
        self._check_there(folder)
        document = {"token": folder.token, "files": {path: list(content) for path, content in folder.files.items()}}
        return self.storage.put_if_absent(self._record(folder.name), json.dumps(document, sort_keys=True).encode())

    def names(self) -> list[str]:
        """Return the names of the folders below the prefix."""
        start = len(self.prefix) + 1
        found = [one.name[start:] for one in self.storage.list(f"{self.prefix}/")]
        return [name.removesuffix(RECORD_SUFFIX) for name in found if "/" not in name and name.endswith(RECORD_SUFFIX)]

    def read(self, name: str) -> StoredFolder:
        """Return the content of a folder.

        Raises:
            MissingFileError: there is no folder of this name.
            NotWholeError: its record is damaged, or a file is missing or has another size.
        """
        folder = self._record_of(name)
        if folder is None:
            raise NotWholeError(f"{self}/{name}{RECORD_SUFFIX} was changed after it was put there: remove it")
        self._check_there(folder)
        return folder

    def fetch(self, folder: StoredFolder, path: str, to: Path, cache: HostCache) -> None:
        """Make ``to`` a hard link to, or a copy of, the folder's file ``path``, through ``cache`` (its ``link``)."""
        cache.link(self.storage, self._file(folder.token, path), folder.files[path], to)

    def remove(self, name: str) -> None:
        """Remove a folder, first its record, then its files; do nothing if there is none of this name."""
        try:
            folder = self._record_of(name)
        except MissingFileError:
            return
        self.storage.delete([self._record(name)])
        if folder is not None:
            self.storage.delete([one.name for one in self.storage.list(f"{self.prefix}/{FILES}/{folder.token}/")])

    def sweep(self) -> None:
        """Remove files that no record names, left by interrupted writings.

        Nobody else may write below the prefix meanwhile: files without a record yet would be removed.
        """
        records = [self._record_of(name) for name in self.names()]
        tokens = {folder.token for folder in records if folder is not None}
        start = f"{self.prefix}/{FILES}/"
        found = self.storage.list(start)
        self.storage.delete([one.name for one in found if one.name[len(start) :].partition("/")[0] not in tokens])

    def _record_of(self, name: str) -> StoredFolder | None:
        """Return the folder that a record describes, None if the record is damaged."""
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
    """Put every file below ``directory`` as the folder ``name``, and into ``cache``, unless that is None.

    A folder that has the name already is not replaced.

    Raises:
        StorageError: the storage cannot be reached; the folder does not exist then.
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
    """Fetch the folder ``name`` to the local path ``directory``, by one rename at the end; replace an older directory.

    Only one process at a time may call this for a directory.

    Raises:
        MissingFileError: there is no such folder.
        StorageError: the storage cannot be reached, or a file differs from its record.
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
