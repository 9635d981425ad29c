"""Prepared data that runs of one host share: runs that would prepare the same data use the same files. Torch-free.

    FOLDER/KEY.json     names of the files of one prepared data set, with size and sha256; null if there is no room
    FOLDER/KEY.lock     lock of the run that prepares it; other runs wait
    FOLDER/files/       the files, within a limit (:class:`trainer.storage.cache.HostCache`)

A run's own files are hard links to these, and nobody changes them. Records are trusted, so only this user may access
the folder. A run reuses data only from runs with the same store, never from another tenant's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embeddings.durable_files import temporary_beside, write_json
from trainer.storage.base import FileContent, NotWholeError, content_of
from trainer.storage.cache import PREPARED, HostCache, cache_folder

BYTES_VARIABLE = "EVENKEEL_PREPARED_BYTES"
DEFAULT_BYTES = 20 * 2**30


class SharedPreparedData:
    """Cache of prepared data that runs of this host share: at most ``limit_bytes``, least recently used removed first.

    Only this user can access ``folder``. ``owner``: store url of the runs that share; runs of another owner see none of
    their data.

    Raises:
        PermissionError: another user could write to the folder.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_BYTES, owner: str = ""):
        self.folder, self._owner = folder, owner
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder)
        self._cache = HostCache(folder, limit_bytes, keeps_used=False)

    def key_of(self, fingerprint: str, settings: dict[str, Any]) -> str:
        """Return the key of prepared data.

        The key is a hash of the data's fingerprint, the manifest's settings, the owner and the release of this code.
        """
        document = [importlib.metadata.version("evenkeel"), self._owner, fingerprint, settings]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    @contextlib.contextmanager
    def only_one(self, key: str, log: Callable[[str], Any]) -> Iterator[None]:
        """Wait until no other process prepares ``key``.

        Other processes are blocked neither by dead processes nor by processes whose data are too large to keep.
        """
        descriptor = os.open(self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log("waits for another run of this host, which prepares the same data")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if self._is_too_large(key):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            yield
        finally:
            os.close(descriptor)

    def take(self, key: str, directory: Path) -> bool:
        """Make links in the empty folder ``directory`` to the files kept for ``key``.

        Returns:
            True if all files exist with their sha256; else False, and no link is made.
        """
        record = self.folder / f"{key}.json"
        try:
            files = {path: FileContent(*content) for path, content in json.loads(record.read_text("utf-8")).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return False
        taken = []
        try:
            for path, content in files.items():
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                self._cache.take(content, directory / path)
                taken.append(directory / path)
        except NotWholeError:
            record.unlink(missing_ok=True)
            for path in taken:
                path.unlink()
            return False
        return True

    def keep(self, key: str, files: Mapping[str, Path]) -> None:
        """Keep finished files under the names that :meth:`take` will give them, as far as there is room.

        Files of another file system are not kept: they would take their space twice.
        """
        contents = {name: content_of(path) for name, path in files.items()}
        record: dict[str, list[Any]] | None = None
        if sum(content.num_bytes for content in contents.values()) <= self._cache.limit_bytes:
            for name, content in contents.items():
                self._cache.adopt(files[name], content)
            record = {name: list(content) for name, content in contents.items()}
        # A run must not fail because its data cannot be kept: they are prepared again.
        with contextlib.suppress(OSError):
            write_json(self.folder / f"{key}.json", record)
        self._forget_lost()

    def clean(self) -> int:
        """Remove all kept files; return their number of bytes. Links that runs have stay."""
        for record in self.folder.glob("*.json"):
            self._forget(record)
        return self._cache.clear()

    def _is_too_large(self, key: str) -> bool:
        """Return True if ``key`` is recorded as too large to keep, so that there is nothing to wait for."""
        try:
            return (self.folder / f"{key}.json").read_text("utf-8").strip() == "null"
        except OSError:
            return False

    def _forget_lost(self) -> None:
        """Remove the records of data that lost a file."""
        there = {path.name for path in (self.folder / "files").iterdir()}
        for record in self.folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError, IndexError):
                if not {content[1] for content in json.loads(record.read_text("utf-8")).values()} <= there:
                    self._forget(record)

    def _forget(self, record: Path) -> None:
        """Remove a record and its lock. At worst, two processes then prepare the same data."""
        record.unlink(missing_ok=True)
        record.with_suffix(".lock").unlink(missing_ok=True)


def _require_own(folder: Path) -> None:
    status, above = folder.lstat(), folder.parent.stat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not is_own or above.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"other users may access {folder}: remove it, or set EVENKEEL_CACHE to another folder")


def clean_host() -> int:
    """Remove the prepared data that runs of this host share; return the bytes. Links that runs have stay.

    Raises:
        OSError: the files belong to another user.
    """
    return SharedPreparedData(cache_folder() / PREPARED).clean()


def _require_links(folder: Path, to: Path) -> None:
    probe = temporary_beside(folder / "link")
    try:
        probe.touch()
        os.link(probe, to / probe.name)
        (to / probe.name).unlink()
    finally:
        probe.unlink(missing_ok=True)


def shared_on_host(owner: str, directory: Path, log: Callable[[str], Any]) -> SharedPreparedData | None:
    """Return this host's shared prepared data, in the cache that the environment names.

    ``owner``: store url of the runs that share it. On another file system than ``directory`` its files would be copies,
    so nothing is shared. ``log`` is called with the reason if the folder cannot be used.

    Returns:
        None if the limit is 0, or the folder cannot be made, hard links to it fail, or others may access it.

    Raises:
        ValueError: the limit is not a number of bytes.
    """
    text = os.environ.get(BYTES_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{BYTES_VARIABLE} is '{text}': write a number of bytes, such as {DEFAULT_BYTES}")
    limit = int(text) if text else DEFAULT_BYTES
    if not limit:
        return None
    try:
        shared = SharedPreparedData(cache_folder() / PREPARED, limit, owner)
        _require_links(shared.folder, directory)
    except OSError as error:
        log(f"prepared data are not shared with other runs: {error}")
        return None
    return shared
