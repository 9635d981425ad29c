"""The files of one collection on this machine: its versions, their manifests and states, and the writer lock.

A collection in a remote store has such a directory too, its mirror, which overrides some methods
(embeddings.store.backends.mirror).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embeddings.durable_files import make_directory
from embeddings.store.files import (
    FileEntry,
    UnknownCollection,
    file_mark,
    read_document,
    replace_document,
    sweep,
    writer_lock,
)
from embeddings.store.manifest import MANIFEST_FILE, VersionManifest
from embeddings.store.pointer import Pointer
from embeddings.store.version import VersionReader, verify_file
from embeddings.vectors.item_vectors import Array

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
VERSION_PATTERN = re.compile(r"v\d{6,}")
POINTER_FILE = "CURRENT"
LOCK_FILE = "LOCK"

Lookup = tuple[str, Array, Array]
"""(version, status uint8 [n], vectors float32 [n, d])."""


class CollectionDirectory:
    """Versions, their manifests and states, the pointer, and the lock of the one writer.

    Attributes:
        rows_are_remote: True if item rows are read from a remote store. Versions may share rows there, so rows that one
            version lost may still be stored for another.
        unswept: reason why this process's last writer could not remove unneeded objects from the remote store; None if
            it removed all.
    """

    rows_are_remote = False
    unswept: str | None = None

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.versions = path / "versions"
        self.states = path / "states"
        self.views = path / "views"
        self.pointer = Pointer(path / POINTER_FILE)

    # --- overridden by a mirror ------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Bring the directory up to date with the remote store, if any."""

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Return the writer lock, as a context; raise UnknownCollection. Entering it may raise StoreBusy."""
        if not self.path.is_dir():
            raise UnknownCollection(f"there is no collection '{self.name}'")
        return writer_lock(self.path / LOCK_FILE)

    def snapshot_read(self) -> contextlib.AbstractContextManager[None]:
        """Return a context inside which this thread reads one state of the collection."""
        return contextlib.nullcontext()

    def look_again(self) -> bool:
        """Return True if an earlier read may be outdated; the next one then reads again, even in ``snapshot_read``."""
        return False

    def data_file(self, version: str, file: FileEntry) -> Path:
        """Check a version's file, fetching it if needed, and return its local path; raise CorruptStore."""
        return verify_file(self.versions / version, file)

    def make_reader(self, version: str, manifest: VersionManifest) -> VersionReader:
        """Return a reader of a version; raise CorruptStore."""
        return VersionReader(self.versions / version, manifest)

    def lookup_current(self, ids: Any, open_current: Callable[[], VersionReader]) -> Lookup:
        """Look up ``ids`` in the current version."""
        reader = open_current()
        return reader.version, *reader.lookup(ids)

    # --- versions --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the collection's folders."""
        for directory in (self.versions, self.states, self.views):
            make_directory(directory)

    def exists(self) -> bool:
        """Return True if there is any version."""
        return self.pointer.read().version is not None or bool(self.version_names())

    def version_names(self) -> list[str]:
        """Return names of all versions, oldest first."""
        self.follow()
        try:
            names = [entry.name for entry in os.scandir(self.versions)]
        except FileNotFoundError:
            return []
        return sorted((name for name in names if VERSION_PATTERN.fullmatch(name)), key=number_of)

    def next_version(self) -> str:
        """Return the name of the next version; the caller holds the writer lock."""
        # A new version must not get the state of an old one whose files are gone (a torn backup).
        marked = [path.stem for path in self.states.glob("v*.json") if VERSION_PATTERN.fullmatch(path.stem)]
        names = [*self.version_names(), *self.pointer.read().versions, *marked]
        return f"v{max(map(number_of, names), default=0) + 1:06d}"

    def read_manifest(self, version: str) -> VersionManifest | None:
        """Read the manifest from disk; return None if there is none, and raise CorruptStore if it is damaged."""
        path = self.versions / version / MANIFEST_FILE
        document = read_document(path)
        return None if document is None else VersionManifest.from_json(document, path)

    def manifest_mark(self, version: str) -> tuple[int, ...] | None:
        """Return the identity of a version's manifest file; None without a file."""
        return file_mark(self.versions / version / MANIFEST_FILE)

    def read_state(self, version: str) -> dict[str, Any]:
        """Return the state document of a version that was held or has expired; {} for other versions."""
        return read_document(self.states / f"{version}.json") or {}

    def save_state(self, version: str, document: dict[str, Any]) -> None:
        """Replace the document that :meth:`read_state` returns; the caller holds the writer lock."""
        make_directory(self.states)  # a mirror lacks it until it has fetched a state
        replace_document(self.states / f"{version}.json", document)

    def is_expired(self, version: str) -> bool:
        """Return True if a version has expired."""
        return self.read_state(version).get("state") == "expired"

    def remove_expired(self) -> None:
        """Remove the files of expired versions except their manifests; the caller holds the writer lock."""
        for version in self.version_names():
            if self.is_expired(version):
                for path in (self.versions / version).iterdir():
                    if path.name != MANIFEST_FILE:
                        path.unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove files of killed writers and of expired versions; the caller holds the writer lock."""
        for directory in (self.path, self.versions, self.states, *self.path.glob("settings/*")):
            sweep(directory)
        self.remove_expired()


def number_of(version: str) -> int:
    """Return the number in a version's name: 1 for ``v000001``."""
    return int(version[1:])
