"""A collection of item vectors: its versions, their states, the switch between them, its views."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from embeddings.store.collection.directory import CollectionDirectory, Lookup
from embeddings.store.collection.erasure import ITEMS, Part
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.collection.views import CollectionViews
from embeddings.store.collection.writer import CollectionWriter
from embeddings.store.files import StoreError, disk_errors
from embeddings.store.manifest import VersionRecord
from embeddings.store.users import Recommender
from embeddings.store.version import VersionReader
from embeddings.store.views import ViewRegistry
from embeddings.vectors.item_columns import ItemColumns
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
        self._anchored = WeakKeyDictionary()

    def exists(self) -> bool:
        """Return True if there is any version."""
        return self._files.exists()

    def current(self) -> str | None:
        """Return the name of the served version, None before the first; a switch by another process shows at once.

        For a remote store it may show ``follow_seconds`` later.
        """
        return self._files.pointer.read().version

    def history(self) -> list[dict[str, Any]]:
        """Return the latest switches, oldest first.

        Each entry is {version, at, kind: publish|promote, reason, override_gate, key}.
        """
        return copy.deepcopy(self._files.pointer.read().history)

    def versions(self) -> list[dict[str, Any]]:
        """Return the manifests of all versions, oldest first, with their states as in :meth:`manifest`."""
        return [record.to_json() for record in self.records()]

    def records(self) -> list[VersionRecord]:
        """Return the same as :meth:`versions`, but as objects and without copies, since there may be very many."""
        return self._reader.records()

    def manifest(self, version: str = "current") -> dict[str, Any]:
        """Return the manifest of a version, by default of the current version.

        Besides the entries written with the version it has ``state`` and, if held, ``reasons``. ``override`` is
        {reason, key, at} if somebody promoted the version although the gate held it, else None. ``damaged`` describes
        damage that this process found in the version's files, else None.

        Raises:
            UnknownVersion: there is no such version.
            UnknownCollection: the collection has no version.
            CorruptStore: the manifest is damaged.
        """
        return self._reader.record(version).to_json()

    def id_type(self, part: Part = ITEMS) -> str:
        """Return the type of item ids, or of user ids: ``int64`` or ``string``.

        Raises:
            UnknownCollection: the collection has no version.
            NoUsers: no version has users.
        """
        return self._reader.id_type() if part == ITEMS else self._reader.user_id_type()

    def open(self, version: str = "current") -> VersionReader:
        """Return a reader of a version, or of the current version.

        Files are checked against the manifest's sha256 once per process. If the current version is damaged, the reader
        reads the version served before it: ``reader.version`` names it, and ``damaged`` reports the damage.

        Raises:
            UnknownVersion: there is no such version.
            UnknownCollection: the collection has no version.
            CorruptStore: the version that the caller named is damaged; or the current version and all that were served
                before it are.
        """
        return self._reader.open(version)

    def lookup(self, ids: Any, version: str = "current") -> Lookup:
        """Look up ``ids`` in one version, as ``open(version).lookup(ids)`` does.

        If the rows are in a remote store this takes one round trip instead of two. The call raises the errors of both.

        Returns:
            (version, status uint8 [n], vectors float32 [n, d]) of ``ids``, in the order given.
        """
        return self._reader.lookup(ids, version)

    def recommender(self, version: str = "current") -> Recommender:
        """Return the items and users of one version, which recommend items to users.

        Raises: NoUsers: the version has only items. UnknownVersion: there is no such version. UnknownCollection: the
            collection has no version. CorruptStore: a file of the version is damaged.
        """
        return self._reader.recommender(version)

    def item_columns(self, version: str = "current") -> ItemColumns | None:
        """Return the columns of the item table that one version has, without reading its users; None if it has none.

        Raises:
            UnknownVersion: there is no such version.
            CorruptStore: a file of the version is damaged.
        """
        return self._reader.item_columns(version)

    def open_anew(self) -> None:
        """Drop this process's open readers and manifests, so that the next reader reads the store again."""
        self._reader.forget()

    def snapshot_read(self) -> contextlib.AbstractContextManager[None]:
        """Return a context inside which this thread reads one state of the collection.

        For a remote collection the index is read at most once inside the context. So reads that belong together see no
        switch in between, and cost no more round trips.
        """
        return self._files.snapshot_read()

    def available_offline(self) -> bool:
        """Return True if vectors can be fetched from files on this machine, without a server."""
        if not self._files.rows_are_remote:
            with contextlib.suppress(StoreError, OSError):
                self.open()
                return True
        return False

    def damaged(self) -> dict[str, str]:
        """Return the versions that this process found damaged, with a description of the damage, by version.

        A version that was restored and opened again since then is left out.
        """
        return self._reader.damaged()

    def rotation(self, version: str = "current") -> Array:
        """Return the rotation R [d, d], float64, from the coordinates of a version's model to those of the version.

        The rotation is the identity if the model's vectors were not rotated.

        Raises:
            UnknownVersion: there is no such version, it has expired, or its R was not kept.
            CorruptStore: the file of R is damaged.
        """
        return self._reader.rotation(version)

    def snapshot(self, path: Path | str, version: str = "current") -> Path:
        """Write a version to a Parquet file (see VersionReader.snapshot)."""
        with disk_errors(Path(path)):
            return self.open(version).snapshot(path)
