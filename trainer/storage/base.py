"""The interface of a run storage: complete files under names, a put that never replaces, and files' checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from embeddings.object_storage import MissingFileError, NotWholeError, StorageError, StoredFile

__all__ = ["MissingFileError", "NotWholeError", "RunStorage", "StorageError", "StoredFile"]


class RunStorage(Protocol):
    """A store of files under names such as ``checkpoints/step-1.json``. Each file exists completely or not at all.

    Every method that uses the storage raises StorageError if it cannot be reached, denies access, or is full.
    """

    uri: str
    """URI of this storage, as :func:`trainer.storage.storage_registry.open_storage` takes it."""

    def put_file(self, name: str, source: Path) -> None:
        """Store the file ``source`` under ``name``, replacing any older file. ``source`` must not change afterwards."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Store ``data`` under ``name`` unless that exists; return True if the stored content now equals ``data``.

        If several processes put different data at once, only one of them gets True.
        """

    def read(self, name: str) -> bytes:
        """Return the content of a small file.

        Raises:
            MissingFileError: there is no file of this name.
        """

    def fetch(self, name: str, to: Path) -> None:
        """Download the file ``name`` to the local path ``to``, which must not exist yet.

        Raises:
            MissingFileError: there is no file of this name.
        """

    def path(self, name: str) -> Path | None:
        """Return the path of the file, only for reading, if the storage is a mounted directory, else None."""

    def list(self, prefix: str) -> list[StoredFile]:
        """Return the files whose names begin with ``prefix``, sorted by name; it must be empty or end in ``/``."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; names without a file are ignored."""


class FileContent(NamedTuple):
    """Size in bytes and sha256 of a file's content; the sha256 is in hexadecimal digits."""

    num_bytes: int
    sha256: str

    def describes(self, path: Path) -> bool:
        """Read the file; return True if it has this size and sha256."""
        return path.stat().st_size == self.num_bytes and content_of(path) == self


def content_of(path: Path) -> FileContent:
    """Read the file; return its size and sha256."""
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return FileContent(num_bytes, hashlib.file_digest(file, "sha256").hexdigest())
