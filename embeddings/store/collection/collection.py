"""A collection of item vectors: its versions, their states, the switch between them, its views."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embeddings.store.collection.directory import CollectionDirectory, Lookup
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.collection.views import CollectionViews
from embeddings.store.collection.writer import CollectionWriter
from embeddings.store.files import StoreError, disk_errors
from embeddings.store.manifest import VersionRecord
from embeddings.store.version import VersionReader
from embeddings.store.views import ViewRegistry
from embeddings.vectors.item_vectors import Array

if TYPE_CHECKING:
    from embeddings.store.feature_store import Store


class Collection(CollectionWriter, CollectionViews):
    """Versions and views of one collection; thread-safe."""

    def __init__(self, files: CollectionDirectory, store: Store):
        self.name = files.name
        self.directory = files.path
        self._files, self._store = files, store
        self._registry = ViewRegistry(files.views, files.name)
        self._reader = CollectionReader(files, store, self._registry)

    def exists(self) -> bool:
        """Return True if there is any version."""
        return self._files.exists()

    def current(self) -> str | None:
        """Return the version that is served, None before the first one; another process's switch is seen at once."""
        return self._files.pointer.read().version

    def history(self) -> list[dict[str, Any]]:
        """Return the latest switches, oldest first.

        Each is {version, at, kind: publish|promote, reason, override_gate, key}.
        """
        return copy.deepcopy(self._files.pointer.read().history)

    def versions(self) -> list[dict[str, Any]]:
        """Return manifests of all versions, oldest first, with their states."""
        return [record.to_json() for record in self.records()]

    def records(self) -> list[VersionRecord]:
        """Return the same as :meth:`versions`, as objects and without copies: there may be very many."""
        return self._reader.records()

    def manifest(self, version: str = "current") -> dict[str, Any]:
        """Return the manifest of a version or of the current one.

        It has, beside what was written with the version, ``state`` and, if held, ``reasons``; ``override``: {reason,
        key, at} where somebody had it served although the gate held it, else None; ``damaged``: what this process found
        wrong with the version's files, else None.

        Raises:
            UnknownVersion: there is no such version.
            UnknownCollection: the collection has no version.
            CorruptStore: the manifest is damaged.
        """
        return self._reader.record(version).to_json()

    def id_type(self) -> str:
        """Return int64 or string; raise UnknownCollection."""
        return self._reader.id_type()

    def open(self, version: str = "current") -> VersionReader:
        """Return a reader of a version, or of the one current now.

        Files are checked against the manifest's sha256 once per process. A damaged current version is not served: the
        one served before it is, an alert is raised (see ``damaged``), and ``reader.version`` says which it is.

        Raises:
            UnknownVersion: there is no such version.
            UnknownCollection: the collection has no version.
            CorruptStore: a version asked for by name is damaged, or no other is whole.
        """
        return self._reader.open(version)

    def lookup(self, ids: Any, version: str = "current") -> Lookup:
        """Look up ``ids`` in one version, as ``open(version).lookup(ids)`` does.

        Where the rows are in a remote store this takes one round trip instead of two. Raises what those raise.

        Returns:
            (version, status uint8 [n], vectors float32 [n, d]) of ``ids``, in the order asked for.
        """
        return self._reader.lookup(ids, version)

    def open_anew(self) -> None:
        """Forget what this process has open: the next reader is of what the store has then."""
        self._reader.forget()

    def snapshot_read(self) -> contextlib.AbstractContextManager[None]:
        """Read one state of the collection inside this context, in this thread.

        Where the collection is remote, its index is looked at once: reads that belong together do not ask again and
        again, and see no switch in between.
        """
        return self._files.snapshot_read()

    def available_offline(self) -> bool:
        """Return True if vectors can be fetched with what is on this machine."""
        if not self._files.rows_are_remote:
            with contextlib.suppress(StoreError, OSError):
                self.open()
                return True
        return False

    def damaged(self) -> dict[str, str]:
        """Return the versions that this process found damaged, and what is wrong with each.

        A version that was restored and opened since is not among them.
        """
        return self._reader.damaged()

    def rotation(self, version: str = "current") -> Array:
        """Return R [d, d] float64 that turned the vectors of the model behind a version into the version's coordinates.

        The identity where nothing was turned.

        Raises:
            UnknownVersion: there is no such version, it has expired, or its R was not kept.
            CorruptStore: the file of R is damaged.
        """
        return self._reader.rotation(version)

    def snapshot(self, path: Path | str, version: str = "current") -> Path:
        """Write a version to a Parquet file (see VersionReader.snapshot)."""
        with disk_errors(Path(path)):
            return self.open(version).snapshot(path)
