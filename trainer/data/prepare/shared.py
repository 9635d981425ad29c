"""Prepared data that runs of one host share: the files of one are those of every other that would prepare the same.

    FOLDER/KEY.json     of each: its files, with size and sha256; null where there is no room for them
    FOLDER/KEY.lock     held by the run that prepares it, for which others wait
    FOLDER/files/       the files, within a limit (:class:`trainer.storage.cache.HostCache`)

A run's own files are hard links, and nobody changes them. The records are believed, so the folder is this user's
alone; and a run takes what runs of its own store have kept, not those of another tenant. Torch-free.
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
    """What runs of this host have prepared, together at most ``limit_bytes``; what was used longest ago goes first.

    Args:
        folder: where it lies; made for this user alone.
        limit_bytes: of all owners together.
        owner: whose runs take and keep here: a store's url. Nothing of one owner is another's.

    Raises:
        PermissionError: another user could write there.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_BYTES, owner: str = ""):
        self.folder, self._owner = folder, owner
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder)
        self._cache = HostCache(folder, limit_bytes, keeps_used=False)

    def key_of(self, fingerprint: str, settings: dict[str, Any]) -> str:
        """Return the key of prepared data.

        It is their fingerprint and all that the specs say in a manifest, for one owner and one release of this code.
        """
        document = [importlib.metadata.version("evenkeel"), self._owner, fingerprint, settings]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    @contextlib.contextmanager
    def only_one(self, key: str, log: Callable[[str], Any]) -> Iterator[None]:
        """Wait until no other process prepares ``key``; one that dies blocks nobody, nor does what is not kept."""
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
        """Make in ``directory``, which is empty, links of the files kept for ``key``.

        Returns:
            Whether all are there, each with its sha256; else there is none.
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
        """Keep files, which change no more, by the names that :meth:`take` gives them, as far as there is room.

        Nothing is kept of another file system, whose disk would hold it twice.
        """
        contents = {name: content_of(path) for name, path in files.items()}
        record: dict[str, list[Any]] | None = None
        if sum(content.num_bytes for content in contents.values()) <= self._cache.limit_bytes:
            for name, content in contents.items():
                self._cache.adopt(files[name], content)
            record = {name: list(content) for name, content in contents.items()}
        # What is not kept is prepared again: no reason for a run to fail.
        with contextlib.suppress(OSError):
            write_json(self.folder / f"{key}.json", record)
        self._forget_lost()

    def clean(self) -> int:
        """Remove all that is kept; return the bytes. Files that runs have stay theirs."""
        for record in self.folder.glob("*.json"):
            self._forget(record)
        return self._cache.clear()

    def _is_too_large(self, key: str) -> bool:
        """Return True if it is known that there is no room for ``key``, so that nobody need wait for it."""
        try:
            return (self.folder / f"{key}.json").read_text("utf-8").strip() == "null"
        except OSError:
            return False

    def _forget_lost(self) -> None:
        """Remove the records of data of which a file has gone."""
        there = {path.name for path in (self.folder / "files").iterdir()}
        for record in self.folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError, IndexError):
                if not {content[1] for content in json.loads(record.read_text("utf-8")).values()} <= there:
                    self._forget(record)

    def _forget(self, record: Path) -> None:
        """Remove a record and its lock. Who waits for the lock meanwhile prepares beside others at worst."""
        record.unlink(missing_ok=True)
        record.with_suffix(".lock").unlink(missing_ok=True)


def _require_own(folder: Path) -> None:
    status, above = folder.lstat(), folder.parent.stat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not is_own or above.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{folder} is not this user's alone: remove it, or set EVENKEEL_CACHE to another folder")


def clean_host() -> int:
    """Remove what runs of this host share; return the bytes. Files that runs have stay theirs.

    Raises:
        OSError: they are another user's.
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

    Args:
        owner: whose runs share it.
        directory: of the run; on another file system its files would be copies, so nothing is shared.
        log: takes why nothing is shared, where the folder is not to be had.

    Returns:
        None where the limit is 0, or the folder cannot be made, has no links there, or is not this user's alone.

    Raises:
        ValueError: a limit that is no number of bytes.
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
