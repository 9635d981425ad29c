"""The cache of a host: files of a storage by their content, within a limit, for all processes of the host.

    FOLDER/files/SHA256         a whole file; its users have hard links to it elsewhere on the file system
    FOLDER/incoming/SHA256      size of a file that is being fetched; the process that fetches it holds its lock
    FOLDER/lock                 held while files are counted and removed

A file with a second hard link is in use and stays. Among unused files, the least recently used are removed first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from embeddings.durable_files import temporary_beside
from trainer.storage.base import FileContent, MissingFileError, NotWholeError, RunStorage, StorageError
from trainer.storage.shared_directory import link_or_copy

CACHE_VARIABLE = "EVENKEEL_CACHE"
LIMIT_VARIABLE = "EVENKEEL_CACHE_BYTES"
DEFAULT_FOLDER = "/var/tmp/evenkeel-cache"
DEFAULT_LIMIT_BYTES = 50 * 2**30
FILES = "files"
PREPARED = "prepared"
"""Folder in the cache for prepared data that runs of the host share (trainer.data.prepare.shared)."""


class CacheFullError(StorageError):
    """A file does not fit into the cache next to the files that are in use."""


class DamagedFileError(NotWholeError):
    """A file of the storage or the cache differs from the file that was once put there."""


class HostCache:
    """A cache of files in ``folder``. Together they take at most ``limit_bytes``, files in use included.

    ``keeps_used``: True if files in use are never removed to make room. If False, they may be: their users still have
    their own hard links. ``beside``: folder of another cache, whose links to the same files do not count as use.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        *,
        keeps_used: bool = True,
        beside: Path | None = None,
    ):
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._keeps_used, self._beside = keeps_used, beside
        self._files, self._incoming = folder / FILES, folder / "incoming"
        for each in (self._files, self._incoming):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)

    def link(self, storage: RunStorage, name: str, content: FileContent, to: Path) -> None:
        """Make ``to`` a hard link to the storage's file ``name``, fetched into the cache if it is not cached yet.

        ``content``, its size and sha256, is checked first. The folder of ``to`` must exist; an existing file ``to`` is
        replaced. If ``to`` is on another file system than the cache, it becomes a copy, which the cache does not count.

        Raises:
            CacheFullError: The file does not fit into the cache.
            DamagedFileError: The storage's file has another size or sha256.
            StorageError: The storage cannot be read.
        """
        temporary = temporary_beside(to)
        try:
            # Try a second time if the cached file was damaged.
            for _ in range(2):
                if not self._link_stored(storage, name, temporary):
                    with self._fetching(content) as incoming:
                        if not self._link_cached(content, temporary):
                            self._fetch(storage, name, content, incoming, temporary)
                if content.describes(temporary):
                    os.rename(temporary, to)
                    return
                with self._locked():
                    (self._files / content.sha256).unlink(missing_ok=True)
                temporary.unlink()
        finally:
            temporary.unlink(missing_ok=True)
        raise DamagedFileError(
            f"{storage.uri}/{name} does not hold the {content.num_bytes} bytes that were put there (sha256 "
            f"{content.sha256}): restore it, use an earlier checkpoint, or run the job again"
        )

    def take(self, content: FileContent, to: Path) -> None:
        """Make the new path ``to`` a hard link to the cached file of this size and sha256, which are checked.

        Raises:
            NotWholeError: The file is not in the cache, or is damaged; a damaged file is removed from the cache.
        """
        if not self._link_cached(content, to):
            raise MissingFileError(f"{self._files / content.sha256} is not there")
        if not content.describes(to):
            to.unlink()
            with self._locked():
                (self._files / content.sha256).unlink(missing_ok=True)
            raise DamagedFileError(f"{self._files / content.sha256} was changed after it was put there: it is removed")

    def clear(self) -> int:
        """Remove all files from the cache, and return their bytes. Hard links outside the cache stay."""
        with self._locked():
            found = list(_there(self._files.iterdir()))
            for path, _ in found:
                path.unlink(missing_ok=True)
        return sum(status.st_size for _, status in found)

    def adopt(self, path: Path, content: FileContent) -> None:
        """Add the local file ``path`` to the cache, if there is room: a later :meth:`link` need not fetch it."""
        target = self._files / content.sha256
        with contextlib.suppress(CacheFullError), self._locked():
            if not target.exists():
                self._make_room(content)
                # Fails on another file system, where it would be a copy that perhaps nobody needs.
                with contextlib.suppress(OSError):
                    os.link(path, target)

    def _link_stored(self, storage: RunStorage, name: str, temporary: Path) -> bool:
        """Hard-link ``temporary`` to the storage's own file; return False unless both are on one file system."""
        path = storage.path(name)
        if path is None:
            return False
        try:
            os.link(path, temporary)
        except OSError:
            return False
        return True

    def _link_cached(self, content: FileContent, temporary: Path) -> bool:
        with self._locked():
            try:
                link_or_copy(self._files / content.sha256, temporary)
                os.utime(self._files / content.sha256)
            except FileNotFoundError:
                return False
        return True

    def _fetch(self, storage: RunStorage, name: str, content: FileContent, incoming: Path, temporary: Path) -> None:
        """Fetch a file into the cache, and link ``temporary`` to it before another process can remove it."""
        with self._locked():
            self._make_room(content)
            # The lock file's size counts as use of the cache from now on; it takes no space on the disk.
            os.truncate(incoming, content.num_bytes)
        part = incoming.with_suffix(".part")
        try:
            part.unlink(missing_ok=True)
            storage.fetch(name, part)
            link_or_copy(part, temporary)
            os.rename(part, self._files / content.sha256)
        finally:
            part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _fetching(self, content: FileContent) -> Iterator[Path]:
        """Yield the lock file of an incoming file; other processes that want the same file wait for it."""
        path = self._incoming / content.sha256
        descriptor = locked(path, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, content: FileContent) -> None:
        """Remove unused files, the least recently used first, until the new file fits."""
        self._remove_abandoned()
        used = sum(found.st_size for _, found in _there(self._incoming.glob("*[0-9a-f]")))
        files = sorted(_there(self._files.iterdir()), key=lambda each: (each[1].st_mtime, each[0].name))
        used += sum(found.st_size for _, found in files)
        for path, found in files:
            if used + content.num_bytes <= self.limit_bytes:
                break
            if not (self._keeps_used and self._is_used(path, found)):
                path.unlink(missing_ok=True)
                used -= found.st_size
        if used + content.num_bytes > self.limit_bytes:
            raise CacheFullError(
                f"{self.folder}: a file of {content.num_bytes} bytes does not fit, for {used} of at most "
                f"{self.limit_bytes} bytes are in use: set {LIMIT_VARIABLE} higher"
            )

    def _is_used(self, path: Path, status: os.stat_result) -> bool:
        links = status.st_nlink - 1
        if links and self._beside is not None:
            with contextlib.suppress(OSError):
                links -= os.path.samestat((self._beside / FILES / path.name).stat(), status)
        return links > 0

    def _remove_abandoned(self) -> None:
        """Remove files that killed processes had begun to fetch."""
        for path in self._incoming.glob("*[0-9a-f]"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                else:
                    path.with_suffix(".part").unlink(missing_ok=True)
                    path.unlink()
                finally:
                    os.close(descriptor)


def locked(path: Path, operation: int) -> int:
    """Return the descriptor of a file that exists and is locked by ``operation`` of flock; make it if needed."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, operation)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # another process has just removed it


def _there(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield (path, status) of the files that still exist.

    Files may disappear meanwhile: a process removes its file in ``incoming`` without holding the cache's lock.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def cache_of_host() -> HostCache:
    """Return the cache of this host: CACHE_VARIABLE of the environment names its folder, LIMIT_VARIABLE its limit.

    Raises:
        ValueError: the limit is not a number of bytes.
    """
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{LIMIT_VARIABLE} is '{text}': write a number of bytes, such as {DEFAULT_LIMIT_BYTES}")
    folder = cache_folder()
    return HostCache(folder, int(text) if text else DEFAULT_LIMIT_BYTES, beside=folder / PREPARED)


def cache_folder() -> Path:
    """Return the absolute path that the environment variable CACHE_VARIABLE names, else DEFAULT_FOLDER."""
    return Path(os.environ.get(CACHE_VARIABLE, "").strip() or DEFAULT_FOLDER).absolute()
