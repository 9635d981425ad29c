"""What a run storage is: whole files under names, and one conditional put."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

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
