"""A run storage: whole files under names, and one conditional put; and the figures that a file is checked by."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from embeddings.object_storage import MissingFileError, NotWholeError, StorageError, StoredFile

__all__ = ["MissingFileError", "NotWholeError", "RunStorage", "StorageError", "StoredFile"]


class RunStorage(Protocol):
    """Files under names such as ``checkpoints/step-1.json``, each there whole or not at all.

    Every method raises StorageError where the storage is away, refuses, or is full.
    """

    uri: str
    """URI that :func:`trainer.storage.storage_registry.open_storage` opens it by."""

    def put_file(self, name: str, source: Path) -> None:
        """Put the content of ``source``, which nobody changes any more, at ``name``; what was there is replaced."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Put ``data`` at ``name`` unless a file is there; return whether ``data`` is there now.

        Of several that put different data at once one alone gets True.
        """

    def read(self, name: str) -> bytes:
        """Return the content of a small file.

        Raises:
            MissingFileError: there is none.
        """

    def fetch(self, name: str, to: Path) -> None:
        """Make ``to``, which is not there yet, a file with the content of ``name``.

        Raises:
            MissingFileError: there is none.
        """

    def path(self, name: str) -> Path | None:
        """Return the path of the file in a mounted directory, for reading alone; None if the storage is none."""

    def list(self, prefix: str) -> list[StoredFile]:
        """Return the files whose names begin with ``prefix``, which is empty or ends with ``/``, by name."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are passed over."""


class FileContent(NamedTuple):
    """Size in bytes and sha256, in hexadecimal digits."""

    num_bytes: int
    sha256: str

    def describes(self, path: Path) -> bool:
        """Read the file; return whether this is its content."""
        return path.stat().st_size == self.num_bytes and content_of(path) == self


def content_of(path: Path) -> FileContent:
    """Read the file and return its content's figures."""
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return FileContent(num_bytes, hashlib.file_digest(file, "sha256").hexdigest())
