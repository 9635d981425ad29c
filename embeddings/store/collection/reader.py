"""Reading a collection: a cache of its versions' manifests, and open readers of their rows."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from embeddings.store.collection.directory import VERSION_PATTERN, CollectionDirectory, Lookup
from embeddings.store.files import CorruptStore, NoUsers, RowsGone, UnknownCollection, UnknownVersion
from embeddings.store.generation_maps import file_of
from embeddings.store.manifest import MANIFEST_FILE, VersionManifest, VersionRecord
from embeddings.store.pointer import Served
from embeddings.store.users import Recommender, read_columns
from embeddings.store.version import VersionReader
from embeddings.store.views import ROTATION_FILE, ViewRegistry, read_matrix
from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import Array

if TYPE_CHECKING:
    from embeddings.store.feature_store import Store

CACHED_READERS = 4
_ATTEMPTS = 5

logger = logging.getLogger("evenkeel.store")


class CollectionReader:
    """Manifests and open readers of one collection; thread-safe."""

    def __init__(self, files: CollectionDirectory, store: Store, views: ViewRegistry):
        self._files = files
        self._store = store
        self._views = views
        self._lock = threading.Lock()
        self._manifests: dict[str, VersionManifest] = {}
        self._marks: dict[str, tuple[int, ...] | None] = {}
        self._pointer_mark: tuple[int, ...] | None = None
        self._readers: collections.OrderedDict[str, VersionReader] = collections.OrderedDict()
        self._recommenders: dict[VersionReader, Recommender] = {}
        self._maps: dict[str, Array] = {}
        self._erasures = 0
        self._damaged: dict[str, str] = {}

    # --- manifests and states --------------------------------------------------------------------------------------

    def resolve(self, version: str) -> str:
        """Return ``version``, or for ``current`` the current version; raise UnknownVersion or UnknownCollection."""
        name = self._files.name
        served = self._files.pointer.read()
        self._forget_replaced(served)
        if version == "current":
            current = served.version
            if current is None:
                kind = UnknownVersion if self._files.exists() else UnknownCollection
                raise kind(f"collection '{name}' has no published version yet: run a job that publishes to it")
            return current
        if not VERSION_PATTERN.fullmatch(version) or not (self._files.versions / version).is_dir():
            if not self._files.exists():
                others = ", ".join(self._store.collections()) or "none"
                raise UnknownCollection(f"there is no collection '{name}' (there are: {others})")
            raise UnknownVersion(f"collection '{name}' has no version {version!r}")
        return version

    def manifest(self, version: str) -> VersionManifest:
        """Read the manifest of a version by its own name; raise CorruptStore."""
        with self._lock:
            manifest = self._manifests.get(version)
        if manifest is None:
            mark = self._files.manifest_mark(version)
            manifest = self._files.read_manifest(version)
            if manifest is None:
                path = self._files.versions / version / MANIFEST_FILE
                raise CorruptStore(
                    f"{path}: the manifest is gone: restore it from a backup, or promote another version"
                )
            with self._lock:
                self._manifests[version], self._marks[version] = manifest, mark
        return manifest

    def manifest_now(self, version: str) -> VersionManifest:
        """Return a version's manifest, read from disk again."""
        with self._lock:
            self._manifests.pop(version, None)
        return self.manifest(version)

    def record(self, version: str = "current") -> VersionRecord:
        """Return a version's manifest and current state; raise as ``Collection.manifest`` does."""
        version = self.resolve(version)
        manifest = self.manifest(version)
        served = self._files.pointer.read()
        mark = self._files.read_state(version)
        if served.version == version:
            state = "published"
        elif mark.get("state") == "expired":
            state = "expired"
        elif version in served.versions:
            state = "superseded"
        else:
            state = mark.get("state", "candidate")
        switches = [switch for switch in served.history if switch["version"] == version]
        return VersionRecord(
            manifest,
            state=state,
            reasons=mark.get("reasons", []),
            published_at=switches[-1]["at"] if switches else None,
            override=mark.get("override"),
            damaged=self.damaged().get(version),
        )

    def records(self) -> list[VersionRecord]:
        """Return the records of all versions, oldest first, without expired versions whose manifest is damaged."""
        return [record for version in self._files.version_names() if (record := self._listed(version)) is not None]

    def _listed(self, version: str) -> VersionRecord | None:
        try:
            return self.record(version)
        except CorruptStore as error:
            if not self._files.is_expired(version):
                raise
            logger.warning("collection '%s': %s; it has expired, so nothing needs it", self._files.name, error)
            return None

    def id_type(self) -> str:
        """Return the id type, ``int64`` or ``string``, of the served version, or else of the newest version.

        Raises:
            UnknownCollection: there is no version.
        """
        served = self._files.pointer.read().version
        names = [served] if served is not None else self._files.version_names()
        if not names:
            raise UnknownCollection(f"there is no collection '{self._files.name}': it has no version yet")
        return self.manifest(names[-1]).id_type

    def user_id_type(self) -> str:
        """Return the id type of the users of the newest version that has users; raise NoUsers if none has."""
        for record in reversed(self.records()):
            if record.manifest.users is not None:
                return str(record.manifest.users["id_type"])
        raise NoUsers(f"no version of collection '{self._files.name}' has users: erase ids of items instead")

    # --- rows ------------------------------------------------------------------------------------------------------

    def open(self, version: str = "current") -> VersionReader:
        """Return a reader of a version (see Collection.open)."""
        try:
            return self._open(version)
        except (CorruptStore, UnknownVersion):
            # The version that was seen may have been replaced and removed since.
            if not self._files.look_again():
                raise
            return self._open(version)

    def lookup(self, ids: Any, version: str = "current") -> Lookup:
        """Look up ``ids`` in one version (see Collection.lookup)."""
        try:
            return self._lookup(ids, version)
        except RowsGone:
            self.forget()
            return self._lookup(ids, version)

    def _lookup(self, ids: Any, version: str) -> Lookup:
        if version == "current":
            return self._files.lookup_current(ids, self.open)
        reader = self.open(version)
        return reader.version, *reader.lookup(ids)

    def recommender(self, version: str = "current") -> Recommender:
        """Return the items and users of a version (see Collection.recommender)."""
        for _ in range(_ATTEMPTS):
            reader = self.open(version)
            with self._lock:
                known = self._recommenders.get(reader)
            if known is not None:
                return known
            file = reader.manifest.users_file
            if file is None:
                raise NoUsers(
                    f"version {reader.version} of '{self._files.name}' has no users: publish one by a job with "
                    "publish.users, or name a version that has them"
                )
            try:
                manifest = reader.manifest
                path = self._files.data_file(reader.version, file)
                others = (
                    None if one is None else self._files.data_file(reader.version, one)
                    for one in (manifest.scored_file, manifest.columns_file, manifest.tower_file)
                )  # fmt: skip
                made = Recommender(reader, path, *others)
            except CorruptStore:
                # The version may have expired, or lost users to an erasure, since it was opened.
                if self._is_replaced(reader.version, reader.manifest) or self._files.is_expired(reader.version):
                    self.forget(reader.version)
                    continue
                raise
            with self._lock:
                if self._readers.get(reader.version) is reader:
                    self._recommenders[reader] = made
            return made
        raise CorruptStore(f"collection '{self._files.name}': version {version} changes faster than it can be read")

    def item_columns(self, version: str = "current") -> ItemColumns | None:
        """Return the columns of a version's items (see Collection.item_columns)."""
        reader = self.open(version)
        file = reader.manifest.columns_file
        return None if file is None else read_columns(self._files.data_file(reader.version, file), reader.keys)

    def opened(self, version: str) -> VersionReader | None:
        """Return the reader of a version if this process has it open, and no rows were erased since; else None."""
        served = self._files.pointer.read()
        with self._lock:
            reader = self._readers.get((served.version if version == "current" else version) or "")
        is_known = (served.erasures, self._files.pointer.mark) == (self._erasures, self._pointer_mark)
        return reader if is_known else None

    def rotation(self, version: str) -> Array:
        """Return R [d, d] of a version (see Collection.rotation)."""
        version = self.resolve(version)
        self.refuse_expired(version)
        manifest = self.manifest(version)
        file = manifest.file(ROTATION_FILE)
        if file is not None:
            return read_matrix(self._files.data_file(manifest.version, file))
        if manifest.alignment.get("kind") == "procrustes":
            raise UnknownVersion(
                f"version {manifest.version} of '{self._files.name}' was rotated by an R that was not kept"
            )
        return np.eye(manifest.dim)

    def map_matrix(self, first: VersionManifest, generation: int) -> Array:
        """Return A [d + 1, e] of the map that a generation's ``first`` version has to an earlier generation.

        Raises:
            CorruptStore: the file of A is damaged.
        """
        file = first.file(file_of(generation))
        assert file is not None
        if file.sha256 not in self._maps:
            self._maps[file.sha256] = read_matrix(self._files.data_file(first.version, file))
        return self._maps[file.sha256]

    def has_map_matrix(self, first: VersionManifest, generation: int) -> bool:
        """Return True if :meth:`map_matrix` reads no file."""
        file = first.file(file_of(generation))
        return file is not None and file.sha256 in self._maps

    def refuse_expired(self, name: str) -> None:
        """Raise UnknownVersion for an expired version, whichever process expired it.

        If this process has a reader of the version open, it drops the reader. The current version never expires, so
        fetches of it need no such check.
        """
        if self._files.is_expired(name):
            self.forget(name)
            raise UnknownVersion(
                f"version {name} of '{self._files.name}' has expired: its vectors were removed"
            ) from None

    def damaged(self) -> dict[str, str]:
        """Return descriptions of the damage that this process found, by version (see Collection.damaged)."""
        with self._lock:
            return dict(self._damaged)

    def forget(self, *versions: str) -> None:
        """Drop manifests and readers of the given versions from the cache, or of all; open readers stay readable."""
        with self._lock:
            for version in versions or {*self._manifests, *self._readers}:
                for known in (self._manifests, self._marks):
                    known.pop(version, None)
                self._drop(version)
        self._views.forget_rows()

    def _forget_replaced(self, served: Served) -> None:
        """Forget all versions after an erasure, and versions that were replaced or are gone when CURRENT has changed.

        A store restored from a backup may give a name that this process has seen to another version.
        """
        if served.erasures != self._erasures:
            self.forget()
            self._erasures = served.erasures
        if (mark := self._files.pointer.mark) == self._pointer_mark:
            return
        with self._lock:
            marks, damaged = dict(self._marks), set(self._damaged)
        replaced = {name for name, seen in marks.items() if self._files.manifest_mark(name) != seen}
        if replaced:
            self.forget(*replaced)
        unnamed = damaged.difference(served.versions)
        gone = {name for name in unnamed if self._files.manifest_mark(name) is None}
        with self._lock:
            for name in (replaced | gone) & damaged:
                self._damaged.pop(name, None)
        self._pointer_mark = mark

    def _open(self, version: str) -> VersionReader:
        if version != "current":
            name = self.resolve(version)
            self.refuse_expired(name)
            return self._open_named(name)
        for attempt in range(_ATTEMPTS):
            name = self.resolve("current")
            try:
                return self._open_named(name)
            except (CorruptStore, UnknownVersion) as error:
                # A switch and a clean-up may both have happened since the pointer was read.
                if self._files.pointer.read().version != name and attempt < _ATTEMPTS - 1:
                    continue
                if not isinstance(error, CorruptStore):
                    raise
                return self._instead_of(name, error)
        raise AssertionError("unreachable")

    def _open_named(self, name: str) -> VersionReader:
        with self._lock:
            reader = self._readers.get(name)
            if reader is not None:
                self._readers.move_to_end(name)
                return reader
        manifest: VersionManifest | None = None
        try:
            manifest = self.manifest(name)
            reader = self._files.make_reader(name, manifest)
        except CorruptStore as error:
            if manifest is not None and self._is_replaced(name, manifest):
                return self._open_named(name)
            self.refuse_expired(name)
            with self._lock:
                known = self._damaged.get(name)
                self._damaged[name] = str(error)
            if known is None:
                logger.error("collection '%s': version %s is damaged: %s", self._files.name, name, error)
            raise
        with self._lock:
            self._damaged.pop(name, None)
            if self._manifests.get(name) is not manifest:
                return reader  # rows were erased meanwhile: this reader may finish, the next is opened anew
            self._readers[name] = reader
            while len(self._readers) > CACHED_READERS:
                self._drop(next(iter(self._readers)))
        return reader

    def _drop(self, version: str) -> None:
        reader = self._readers.pop(version, None)
        if reader is not None:
            self._recommenders.pop(reader, None)

    def _is_replaced(self, version: str, manifest: VersionManifest) -> bool:
        """Return True if a version's manifest on disk now differs from ``manifest``."""
        with contextlib.suppress(CorruptStore):
            return self.manifest_now(version) != manifest
        return False

    def _instead_of(self, name: str, error: CorruptStore) -> VersionReader:
        """Return a reader of the last undamaged version served before the damaged one; raise ``error`` without any."""
        for previous in reversed(self._files.pointer.read().versions):
            if previous != name:
                with contextlib.suppress(CorruptStore, UnknownVersion):
                    self.refuse_expired(previous)
                    return self._open_named(previous)
        raise error
