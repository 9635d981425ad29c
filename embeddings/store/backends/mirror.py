"""A collection in a remote store: a local mirror of its documents, and there an index whose replacement is the switch.

The mirror is a directory of the embedded store, so everything that is done to a collection is done to the mirror, by
the same code. The remote store has the same files as objects that are never changed (an object's name holds the sha256
of its content), and the *index*: which object each file is.

    reading   the index is asked for when it is older than ``follow_seconds``; a new one's documents are fetched,
              checked, and put in place, CURRENT last. Files of a version are fetched when it is opened.
    writing   under the writer lock there: bring the mirror up to date, do what is to be done to it, put the files that
              are new, replace the index. Before that no other machine sees anything, and CURRENT is replaced here only
              after it. What failed on the way is taken out of the mirror again.

Readers therefore see one index or the next, never a mix; a writer that dies leaves objects which no index names, and
the next one removes them. While the store cannot be reached, versions that are here are served on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from embeddings.durable_files import appearing, file_sha256, make_directory, temporary_beside, write_file
from embeddings.store.collection import MANIFEST_FILE, NAME_PATTERN, Collection
from embeddings.store.feature_store import Store
from embeddings.store.files import (
    CorruptStore,
    StoreBusy,
    StoreUnavailable,
    UnknownCollection,
    UnknownVersion,
    decode_document,
    disk_errors,
    encode_document,
    read_document,
    writer_lock,
)
from embeddings.store.lease import Lease
from embeddings.store.pointer import Pointer, Served
from embeddings.store.version import VersionReader, is_items_file, items_entry, mark_verified, verify_file
from embeddings.vectors.item_vectors import Array

logger = logging.getLogger("evenkeel.store")

INDEX_FILE = "INDEX"
POINTER_FILE = "CURRENT"
# What belongs to the mirror alone; ERASING is the lock of who erases on this machine.
_OWN_FILES = frozenset({INDEX_FILE, "LOCK", "ERASING"})
_ATTEMPTS = 5
_RETRY_SECONDS = 1.0

Files = dict[str, dict[str, Any]]


class Remote(Protocol):
    """The remote side of one collection: objects, the index, a lock; each call raises StoreUnavailable."""

    items_stay_there: bool
    """Whether item rows are read where they lie, instead of being fetched with the other files of a version."""

    def index(self) -> bytes | None:
        """Return the index, None before the first commit."""
        ...

    def commit(self, index: bytes, lease: Lease) -> None:
        """Replace the index in one step; raise StoreBusy if this writer does not hold the lock any more."""
        ...

    def put(self, path: str, file: Path, sha256: str, parent: str | None) -> str:
        """Put a file's content there, and return the object's name.

        ``parent`` is the object of the same file in the version before this one.
        """
        ...

    def fetch(self, name: str, to: Path) -> None:
        """Write an object to a file; raise FileNotFoundError where there is none."""
        ...

    def sweep(self, kept: set[str]) -> None:
        """Remove all objects but ``kept``; only under the lock."""
        ...

    def lock(self) -> contextlib.AbstractContextManager[Lease]:
        """Return the lock of the collection's one writer; entering it raises StoreBusy."""
        ...

    def reader(self, manifest: dict[str, Any], name: str) -> VersionReader:
        """Return a reader of item rows that stay there."""
        ...

    def lookup(self, reader: VersionReader, ids: Any, index: bytes) -> tuple[Array, Array] | None:
        """Return ``reader.lookup(ids)`` of item rows that stay there, if the index still is ``index``.

        Both are asked in the same round trip. None if the index is another.
        """
        ...


class RemoteStore(Store):
    """A store that is not a local folder, through mirrors of its collections under ``cache``."""

    lies_elsewhere = True

    def __init__(
        self,
        url: str,
        cache: Path,
        names: Callable[[], Iterable[str]],
        connect: Callable[[str], Remote],
        follow_seconds: float,
    ):
        super().__init__(cache)
        self.url = url
        self._list = names
        self._connect = connect
        self._follow_seconds = follow_seconds

    def reach(self) -> None:
        self._list()

    def serves_alone(self) -> bool:
        here = [self.collection(name) for name in super()._names() if NAME_PATTERN.fullmatch(name)]
        within = [self.namespace(name) for name in self.namespaces()]
        return any(collection.serves_alone() for collection in here) or any(store.serves_alone() for store in within)

    def _names(self) -> Iterable[str]:
        try:
            return self._list()
        except StoreUnavailable:
            here = list(super()._names())
            if not here:
                raise  # nothing was ever seen of it: not a store without collections
            return here

    def _make_collection(self, name: str) -> Collection:
        return MirroredCollection(self, name, self._connect(name), self._follow_seconds)


class MirroredPointer(Pointer):
    """CURRENT of the mirror: up to date when it is read, committed in the remote store before it is replaced here."""

    def __init__(self, path: Path, follow: Callable[[], None], commit: Callable[[bytes], None]):
        super().__init__(path)
        self._follow = follow
        self._commit = commit

    def read(self) -> Served:
        self._follow()
        return super().read()

    def _replace(self, document: dict[str, Any]) -> None:
        self._commit(encode_document(document))
        super()._replace(document)


class MirroredCollection(Collection):
    """A collection that is not local, through its mirror under ``store.root``; processes may share a mirror."""

    def __init__(self, store: Store, name: str, remote: Remote, follow_seconds: float):
        super().__init__(store, name)
        self._remote = remote
        self._follow_seconds = follow_seconds
        self.versions_share_rows = remote.items_stay_there
        self._pointer = MirroredPointer(self.directory / POINTER_FILE, self._follow, self._commit_pointer)
        self._index_file = self.directory / INDEX_FILE
        self._seen: bytes | None = None
        self._files: Files = {}
        self._following = False
        self._looking = threading.Lock()
        self._is_dirty = False
        self._next_look = 0.0
        self._steady = threading.local()
        self._latest: tuple[bytes, VersionReader] | None = None
        self._writer: int | None = None
        self._lease: Lease | None = None

    # --- following -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Bring the mirror up to date, if it was not looked at for ``follow_seconds``."""
        if self._writer == threading.get_ident() or time.monotonic() < self._next_look:
            return
        if getattr(self._steady, "within", False):
            if self._steady.looked:
                return
            self._steady.looked = True
        if self._following or self._seen is None:
            self._look()
        elif self._looking.acquire(blocking=False):
            # One waits to hear whether the store is back; the others go on with what is here.
            try:
                self._look()
            finally:
                self._looking.release()

    def _look(self) -> None:
        try:
            data = self._remote.index()
            if data is not None and (data != self._seen or self._is_dirty):
                self._catch_up(data)
        except StoreUnavailable as error:
            if self._seen is None and not self._remember():
                raise
            if self._following:
                logger.warning("collection '%s': serving what is here: %s", self.name, error)
            self._following = False
            self._next_look = time.monotonic() + max(self._follow_seconds, _RETRY_SECONDS)
            return
        self._following = True
        self._next_look = time.monotonic() + self._follow_seconds

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        if getattr(self._steady, "within", False):
            yield
            return
        self._steady.within, self._steady.looked = True, False
        try:
            yield
        finally:
            self._steady.within = False

    def open(self, version: str = "current") -> VersionReader:
        try:
            return super().open(version)
        except (CorruptStore, UnknownVersion):
            if not (getattr(self._steady, "within", False) and self._steady.looked):
                raise
            # What was seen may have been switched from, and removed, since.
            self._steady.looked = False
            return super().open(version)

    def lookup(self, ids: Any, version: str = "current") -> tuple[str, Array, Array]:
        if version != "current" or not self._remote.items_stay_there:
            return super().lookup(ids, version)
        latest = self._latest
        if latest is not None:
            found = self._remote.lookup(latest[1], ids, latest[0])
            if found is not None:
                return latest[1].version, *found
        reader, seen = self.open(), self._seen
        # What is served instead of a damaged version is given up as soon as that is restored.
        if seen is not None and reader.version == Pointer.read(self._pointer).version:
            self._latest = seen, reader
        return reader.version, *reader.lookup(ids)

    def _catch_up(self, data: bytes) -> None:
        make_directory(self.directory)
        # Whoever has the lock is bringing the mirror up to date, or is the one writer there is.
        patience = 0.0 if self._seen is not None or self._remember() else 60.0
        with contextlib.suppress(*([StoreBusy] if self._seen is not None else [])):
            with disk_errors(self.directory), writer_lock(self.directory / "LOCK", patience):
                # Another process of this host may have pulled a later one before it gave up the lock.
                self._pull(self._remote.index() or data)

    def _remember(self) -> bool:
        """Take up the last state of the mirror, for when the store cannot be reached; return whether there is one."""
        with contextlib.suppress(FileNotFoundError, CorruptStore):
            self._adopt(self._index_file.read_bytes())
        return self._seen is not None

    def _adopt(self, data: bytes) -> None:
        self._files = files_of(data, self._index_file)
        self._seen = data

    def _pull(self, data: bytes | None) -> None:
        """Make the mirror equal to the store, whose index is ``data``; under the mirror's lock.

        Raises:
            CorruptStore: an object that the index names is gone or damaged.
        """
        for attempt in range(_ATTEMPTS):
            files: Files = {} if data is None else files_of(data, Path(self._index_name()))
            try:
                self._fetch_documents(files)
                break
            except (FileNotFoundError, CorruptStore) as error:
                # The index may have moved on while its objects were being fetched.
                before, data = data, self._remote.index()
                if data == before or attempt == _ATTEMPTS - 1:
                    raise CorruptStore(
                        f"{self._index_name()}: an object that it names is gone or damaged ({error}): restore it"
                    ) from error
        self._prune(files)
        self._is_dirty = False
        if data is None:
            # Objects that were put there once are there no more, if the store lost what it had.
            self._index_file.unlink(missing_ok=True)
            self._files, self._seen = {}, None
        else:
            write_file(self._index_file, data, durable=False)
            self._adopt(data)

    def _fetch_documents(self, files: Files) -> None:
        for path in sorted(files, key=lambda path: path == POINTER_FILE):
            entry, target = files[path], self.directory / path
            if _is_data(path) or (target.is_file() and file_sha256(target) == entry["sha256"]):
                continue
            self._fetch(entry, target)

    def _fetch(self, entry: dict[str, Any], target: Path) -> None:
        make_directory(target.parent)
        with appearing(target, durable=False) as place:
            self._remote.fetch(entry["object"], place)
            if file_sha256(place) != entry["sha256"]:
                raise CorruptStore(
                    f"{self._index_name()}: object {entry['object']} is damaged (its sha256 is not the index's): "
                    "restore it from a backup, or promote another version"
                )

    def _prune(self, files: Files) -> None:
        """Remove what the index does not name."""
        for path in self._local_files():
            if path not in files:
                (self.directory / path).unlink(missing_ok=True)
        if self._versions.is_dir():
            for directory in self._versions.iterdir():
                if not directory.name.startswith(".") and not (directory / MANIFEST_FILE).exists():
                    shutil.rmtree(directory, ignore_errors=True)

    # --- writing ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        make_directory(self.directory)
        with writer_lock(self.directory / "LOCK"), self._remote.lock() as lease:
            prepared = self._versions.is_dir()
            self._pull(self._remote.index())
            if prepared:
                self._prepare()
            elif not self._versions.is_dir():
                raise UnknownCollection(f"there is no collection '{self.name}'")
            self._writer, self._lease = threading.get_ident(), lease
            try:
                yield
                self._push()
            except BaseException:
                self._revert()
                raise
            finally:
                self._writer = self._lease = None

    def _commit_pointer(self, pointer: bytes) -> None:
        temporary = temporary_beside(self.directory / POINTER_FILE)
        try:
            temporary.write_bytes(pointer)
            self._push({POINTER_FILE: temporary})
        finally:
            temporary.unlink(missing_ok=True)

    def _push(self, replaced: dict[str, Path] | None = None) -> None:
        """Upload what is new in the mirror, with ``replaced`` in place of the files there, and commit."""
        local = {**self._local_files(), **(replaced or {})}
        files: Files = {}
        for path, file in local.items():
            known = self._files.get(path)
            sha256 = self._sha256(path, file)
            if known is not None and known["sha256"] == sha256:
                files[path] = known
            else:
                name = self._remote.put(path, file, sha256, self._parent_object(path))
                files[path] = {"sha256": sha256, "bytes": file.stat().st_size, "object": name}
        for path, entry in self._files.items():
            # Documents are all here: one that is not was removed. Data was perhaps never fetched.
            if path not in files and _is_data(path) and not self._expired(path, local):
                files[path] = entry
        if files == self._files:
            return
        assert self._lease is not None
        self._lease.check()
        data = encode_document({"collection": self.name, "at": time.time(), "nonce": uuid.uuid4().hex, "files": files})
        self._remote.commit(data, self._lease)
        self._adopt(data)
        for path in files:
            if self._remote.items_stay_there and is_items_file(PurePosixPath(path).name):
                (self.directory / path).unlink(missing_ok=True)
        self._remote.sweep({entry["object"] for entry in files.values()})

    def _sha256(self, path: str, file: Path) -> str:
        if not _is_data(path):
            return file_sha256(file)
        # Its writer hashed it while it was written; the manifest is the one that says what it must be.
        entry = self._entry(path)
        return file_sha256(file) if entry is None else str(entry["sha256"])

    def _entry(self, path: str) -> dict[str, Any] | None:
        place = PurePosixPath(path)
        manifest = read_document(self.directory / place.parent / MANIFEST_FILE) or {"files": []}
        return next((entry for entry in manifest["files"] if entry["name"] == place.name), None)

    def _parent_object(self, path: str) -> str | None:
        place = PurePosixPath(path)
        if not (_is_data(path) and is_items_file(place.name)):
            return None
        manifest = read_document(self.directory / place.parent / MANIFEST_FILE) or {}
        return self._items_object(str(manifest.get("parent")))

    def _items_object(self, version: str) -> str | None:
        manifest = read_document(self._versions / version / MANIFEST_FILE)
        if manifest is None:
            return None
        found = self._named(f"versions/{version}/{items_entry(manifest)['name']}")
        return None if found is None else str(found["object"])

    def _named(self, path: str) -> dict[str, Any] | None:
        """Return what the index says of a file, None for one that it does not name."""
        found = self._files.get(path)
        if found is None and self._writer != threading.get_ident():
            # Another process may have brought their common mirror further than this one has looked.
            with contextlib.suppress(StoreUnavailable):
                data = self._remote.index()
                if data is not None:
                    found = files_of(data, Path(self._index_name())).get(path)
        return found

    def _expired(self, path: str, local: dict[str, Path]) -> bool:
        """Return whether nothing names a file of a version any more.

        The version was expired, or has other rows since an erasure.
        """
        version = PurePosixPath(path).parent.name
        if f"versions/{version}/{MANIFEST_FILE}" not in local:
            return True
        if self._entry(path) is None:
            return True
        return self._is_expired(version)

    def _revert(self) -> None:
        """Take what was not committed out of the mirror, as far as that can be done now.

        The rest is done when the store can be reached again.
        """
        self._is_dirty = True
        try:
            self._pull(self._remote.index())
        except Exception as error:
            logger.warning("collection '%s': the mirror waits for the store to come back: %s", self.name, error)
            self._prune(self._files)

    # --- reading what may have changed elsewhere -------------------------------------------------------------------

    def view_names(self) -> list[str]:
        self._follow()
        return super().view_names()

    def has_view(self, name: str, anchor_generation: int) -> bool:
        self._follow()
        return super().has_view(name, anchor_generation)

    def settings(self, kind: str) -> dict[str, dict[str, Any]]:
        self._follow()
        return super().settings(kind)

    def serves_alone(self) -> bool:
        return not self._remote.items_stay_there and super().serves_alone()

    def clean(self) -> None:
        self._follow()
        super().clean()

    def _version_names(self) -> list[str]:
        self._follow()
        return super()._version_names()

    def _make_reader(self, name: str, manifest: dict[str, Any]) -> VersionReader:
        directory = self._versions / name
        staying = items_entry(manifest)["name"] if self._remote.items_stay_there else None
        with disk_errors(self.directory):
            for entry in manifest["files"]:
                if entry["name"] != staying:
                    self._have(directory, entry)
        if staying is None:
            return super()._make_reader(name, manifest)
        item_rows = self._items_object(name)
        if item_rows is None:
            raise CorruptStore(f"{self._index_name()}: has no item rows of version {name}")
        return self._remote.reader(manifest, item_rows)

    def _have(self, directory: Path, entry: dict[str, Any]) -> None:
        """Fetch a file of a version, unless it is here and whole.

        Raises:
            CorruptStore: the index does not name the file, or its object is gone.
        """
        path = directory / entry["name"]
        with contextlib.suppress(CorruptStore):
            verify_file(directory, entry)
            return
        there = self._named(path.relative_to(self.directory).as_posix())
        if there is None:
            raise CorruptStore(f"{self._index_name()}: does not name {path.name} of version {directory.name}")
        try:
            self._fetch({**there, "sha256": entry["sha256"]}, path)
        except FileNotFoundError as error:
            raise CorruptStore(f"{self._index_name()}: object {there['object']} is gone: restore it") from error
        mark_verified(directory, entry)

    # --- names -----------------------------------------------------------------------------------------------------

    def _local_files(self) -> dict[str, Path]:
        """Return files of the mirror by their path in it, without what is being written."""
        found = {}
        for folder, folders, names in os.walk(self.directory):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.directory).as_posix()
                if not name.startswith(".") and relative not in _OWN_FILES:
                    found[relative] = path
        return found

    def _index_name(self) -> str:
        return f"{self._store.url}: index of collection '{self.name}'"


def files_of(index: bytes, where: Path) -> Files:
    """Return the files that an index names.

    Raises:
        CorruptStore: a damaged index, or a path that leaves the mirror: someone who can write to the store must not be
            able to write to other places on the machines that read it.
    """
    files: Files = decode_document(index, where)["files"]
    for path in files:
        if path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise CorruptStore(f"{where}: names {path!r}, which is no path in a collection: restore it from a backup")
    return files


def _is_data(path: str) -> bool:
    """Return whether a path is a file of a version, which is fetched when it is needed, and not a document."""
    return path.startswith("versions/") and not path.endswith("/" + MANIFEST_FILE)


def content_name(path: str, sha256: str) -> str:
    """Return the name of the object of a file.

    It says what the file is called, and what is in it, so that objects are never changed.
    """
    place = PurePosixPath(path)
    return str(place.with_name(f"{place.stem}-{sha256[:16]}{place.suffix}"))
