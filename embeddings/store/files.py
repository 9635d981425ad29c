"""Files of the embedded store: durable writes, documents with checksums, one writer at a time, the store's errors.

Every change that a reader can see is one ``os.replace`` or ``os.rename`` of a file already synced to the disk. So a
reader sees the old state or the new, never a state in between, even if a writer is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from embeddings.durable_files import write_file

LOCK_TIMEOUT_SECONDS = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(ValueError):
    """Base of the store's errors: what happened, where, and the remedy."""


class UnknownCollection(StoreError):
    """No collection of that name has a version."""


class UnknownVersion(StoreError):
    """The collection has no such version, or its data was removed by retention."""


class NoUsers(StoreError):
    """The version has only item vectors, so it cannot recommend items to users."""


class UnknownView(StoreError):
    """The collection has no such view, or not for the requested anchor generation."""


class ViewExists(StoreError):
    """A view of that name exists with other parameters or in another collection."""


class StaleParent(StoreError):
    """The requested change was based on a version that is no longer served."""


class GateHeld(StoreError):
    """The version did not pass the gate, and the promotion did not override it."""


class IdsErased(StoreError):
    """The items to write contain ids that were erased."""


class CorruptStore(StoreError):
    """A file of the store is damaged or missing: its content differs from what was written."""


class RowsGone(UnknownVersion, CorruptStore):
    """The rows of an open version are no longer in the remote store: the version expired, or the store lost them."""


class NewerStore(StoreError):
    """A newer version of Evenkeel wrote the collection in a format that this version cannot read."""


class StoreFull(StoreError):
    """A write failed because the disk is full or a quota or file size limit was reached; its files were removed."""


class StoreBusy(StoreError):
    """Another process held the collection's writer lock for too long, or has taken it over."""


class StoreUnavailable(StoreError):
    """A remote store (Redis, object storage) could not be reached, or a directory is mounted read-only."""


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn OSErrors for full disks, quotas and file sizes into StoreFull, for read-only disks into StoreUnavailable."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"{where}: {os.strerror(error.errno)}: nothing was published and what is served is unchanged; "
                "free space or lower the number of versions kept, then run again"
            ) from error
        if error.errno == errno.EROFS:
            raise StoreUnavailable(
                f"{where}: {os.strerror(error.errno)}: nothing was published and what is served is unchanged; "
                "mount it writable, then run again"
            ) from error
        raise


class FileEntry(NamedTuple):
    """A file as a manifest lists it: its name, the sha256 of its content in hex, and how many bytes it has."""

    name: str
    sha256: str
    bytes: int


class HashingFile:
    """A file being written, with the sha256 and size of the bytes so far; closing it syncs it to the disk."""

    def __init__(self, path: Path):
        self._name = path.name
        self._file: IO[bytes] = open(path, "xb", buffering=0)  # noqa: SIM115
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        written = 0
        while written < len(view):
            written += self._file.write(view[written:]) or 0
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def entry(self) -> FileEntry:
        """Return the manifest entry of the file."""
        return FileEntry(self._name, self._hash.hexdigest(), self.num_bytes)


# --- documents: JSON with a checksum of its own ----------------------------------------------------------------------


def encode_document(document: dict[str, Any]) -> bytes:
    body = json.dumps(document, allow_nan=False, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return (
        json.dumps({"checksum": checksum, "document": document}, allow_nan=False, sort_keys=True, indent=1) + "\n"
    ).encode()


def decode_document(data: bytes, where: Path) -> dict[str, Any]:
    """Return the document in ``data``; raise CorruptStore, naming ``where``, if its checksum does not match."""
    try:
        outer = json.loads(data)
        document = outer["document"]
        body = json.dumps(document, allow_nan=False, sort_keys=True, separators=(",", ":"))
        sound = outer["checksum"] == hashlib.sha256(body.encode()).hexdigest()
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound or not isinstance(document, dict):
        raise CorruptStore(f"{where}: the file is damaged (its checksum does not match): restore it from a backup")
    return document


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the document at ``path``, or None if there is no file; raise CorruptStore."""
    try:
        return decode_document(path.read_bytes(), path)
    except FileNotFoundError:
        return None


def file_mark(path: Path) -> tuple[int, ...] | None:
    """Return the identity of a file, which changes when it is replaced or rewritten; None if there is no file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def replace_document(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` to ``path`` in one step, synced to the disk."""
    write_file(path, encode_document(document))


# --- one writer ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writer_lock(path: Path, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
    """Hold the exclusive lock of a file, for threads and processes alike; the kernel frees it when its holder dies.

    Raises:
        StoreBusy: another process held it for ``timeout_seconds``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout_seconds
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise StoreBusy(
                    f"{path}: another process has kept the writer lock for {timeout_seconds:g} s: "
                    "end it if it is stuck (see: fuser FILE), then try again"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Workspace:
    """A private directory ``.tmp-*`` under ``parent``, for files that are moved into place once complete.

    The owning process holds a lock on a file next to the directory, so that ``sweep`` recognizes directories of dead
    processes. Create it under the writer lock; using and closing it needs no lock.
    """

    def __init__(self, parent: Path):
        self.path = parent / f".tmp-{uuid.uuid4().hex}"
        self._lock = self.path.with_name(self.path.name + ".lock")
        self._descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _try_lock(self._descriptor)
            os.mkdir(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the directory, unless it was moved into place, and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)


def sweep(directory: Path) -> None:
    """Remove the leftovers of killed writers in ``directory``: workspaces of dead processes, half-written documents.

    Call it only under the writer lock, so that no document is being written and no workspace being made.
    """
    for path in directory.glob(".tmp-*"):
        if path.suffix == ".lock":
            _sweep_workspace(path)
        elif path.is_file():
            path.unlink(missing_ok=True)


def _sweep_workspace(lock: Path) -> None:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if _try_lock(descriptor):
            shutil.rmtree(lock.with_name(lock.name.removesuffix(".lock")), ignore_errors=True)
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
