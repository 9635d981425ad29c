"""Interface of a remote store: immutable objects, and an index that maps each file to its object."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from embeddings.store.files import CorruptStore, decode_document, encode_document
from embeddings.store.lease import Lease
from embeddings.store.manifest import VersionManifest
from embeddings.store.version import VersionReader
from embeddings.vectors.item_vectors import Array

INDEX_FILE = "INDEX"

Files = dict[str, dict[str, Any]]
"""Entries {"sha256", "bytes", "object"} of files, by the file's path in the collection; "object" is its name."""


class Remote(Protocol):
    """The remote side of one collection: objects, the index, a lock; each call raises StoreUnavailable."""

    items_stay_there: bool
    """True if item rows are read from the remote side instead of being fetched with a version's other files."""

    def index(self) -> bytes | None:
        """Return the index, None before the first commit."""
        ...

    def commit(self, index: bytes, before: bytes | None, lease: Lease) -> None:
        """Replace the index atomically by ``index``, if it still is ``before`` (None: no index yet).

        Raises:
            StoreBusy: this writer has lost the lock, or another writer has replaced the index.
        """
        ...

    def put(self, path: str, file: Path, sha256: str) -> str:
        """Upload a file as a new object, and return the object's name."""
        ...

    def fetch(self, name: str, to: Path) -> None:
        """Write an object to a file; raise FileNotFoundError if there is no such object."""
        ...

    def sweep(self, named: set[str], lease: Lease) -> None:
        """Remove all objects but those that the index names.

        The lease is checked before each removal, so that objects of a later writer are not removed.

        Raises:
            StoreBusy: the lease has ended; objects may be left.
        """
        ...

    def lock(self) -> contextlib.AbstractContextManager[Lease]:
        """Return the lock of the collection's one writer; entering it raises StoreBusy."""
        ...

    def reader(self, manifest: VersionManifest, name: str) -> VersionReader:
        """Return a reader of item rows that stay on the remote side."""
        ...

    def lookup(self, reader: VersionReader, ids: Any, index: bytes) -> tuple[Array, Array] | None:
        """Return ``reader.lookup(ids)`` of item rows that stay on the remote side, if the index still is ``index``.

        One round trip reads both. Return None if the index has changed.
        """
        ...


def encode_index(collection: str, files: Files) -> bytes:
    """Return the bytes of a new index of ``files``; they differ from all others, even for equal files."""
    return encode_document({"collection": collection, "at": time.time(), "nonce": uuid.uuid4().hex, "files": files})


def files_of(index: bytes, where: Path) -> Files:
    """Return the files that an index names.

    Raises:
        CorruptStore: a damaged index, or a path outside the mirror, which could overwrite other files of the readers'
            machines.
    """
    files: Files = decode_document(index, where)["files"]
    for path in files:
        if path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise CorruptStore(f"{where}: names {path!r}, which is no path in a collection: restore it from a backup")
    return files


def content_name(path: str, sha256: str) -> str:
    """Return the name of the object that stores a file.

    The name contains the file's name and hash, so that an object never has to change.
    """
    file = PurePosixPath(path)
    return str(file.with_name(f"{file.stem}-{sha256[:16]}{file.suffix}"))
