"""A collection in a remote store: a local mirror of its documents, and a remote index that is replaced atomically.

The mirror is a directory of the embedded store, so the embedded store's code also reads and changes it. The remote
store holds the same files as objects that never change (an object's name contains the sha256 of its content). It also
holds the *index*, which maps each file to its object.

    reading   The index is read again when it is older than ``follow_seconds``. If it is new, its documents are fetched,
              checked, and put into the mirror, CURRENT last. Files of a version are fetched when it is opened.
    writing   Under the remote writer lock: bring the mirror up to date, change it, upload the new files, replace the
              index. Other machines see the change only once the index is replaced; the mirror's CURRENT is replaced
              after that. If anything fails, the change is removed from the mirror.

Readers therefore see one index or the next, never a mix. A writer that dies leaves objects that no index names, and
the next writer removes them. While the store cannot be reached, versions in the mirror are still served.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from embeddings.durable_files import appearing, file_sha256, make_directory, temporary_beside, write_file
from embeddings.store.backends.remote import INDEX_FILE, Files, Remote, encode_index, files_of
from embeddings.store.collection import erasure
from embeddings.store.collection.directory import LOCK_FILE, POINTER_FILE, CollectionDirectory, Lookup
from embeddings.store.files import (
    CorruptStore,
    FileEntry,
    RowsGone,
    StoreBusy,
    StoreUnavailable,
    UnknownCollection,
    disk_errors,
    encode_document,
    writer_lock,
)
from embeddings.store.lease import Lease
from embeddings.store.manifest import MANIFEST_FILE, VersionManifest, is_items_file, is_users_file
from embeddings.store.pointer import Pointer, Served
from embeddings.store.version import VersionReader, mark_verified, verify_file

logger = logging.getLogger("evenkeel.store")

# Files that only the mirror has, among them the lock of erasures on this machine.
_OWN_FILES = frozenset({INDEX_FILE, LOCK_FILE, erasure.LOCK_FILE})
_ATTEMPTS = 5
_RETRY_SECONDS = 1.0


class MirroredPointer(Pointer):
    """CURRENT of the mirror: reading brings it up to date; a change is committed remotely before it is replaced."""

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


class Mirror(CollectionDirectory):
    """The local directory of a remote collection; several processes may share a mirror."""

    def __init__(self, path: Path, name: str, remote: Remote, follow_seconds: float, url: str):
        super().__init__(path, name)
        self.remote = remote
        self.rows_are_remote = remote.items_stay_there
        self.pointer = MirroredPointer(path / POINTER_FILE, self.follow, self._commit_pointer)
        self.next_look = 0.0
        self._follow_seconds = follow_seconds
        self._index_name = f"{url}: index of collection '{name}'"
        self._index_file = path / INDEX_FILE
        self._seen: bytes | None = None
        self._files: Files = {}
        self._following = False
        self._looking = threading.Lock()
        self._is_dirty = False
        self._snapshot = threading.local()
        self._latest: tuple[bytes, VersionReader] | None = None
        self._writer: int | None = None
        self._lease: Lease | None = None

    # --- following -------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Bring the mirror up to date if the index was last read more than ``follow_seconds`` ago."""
        if self._writer == threading.get_ident() or time.monotonic() < self.next_look:
            return
        if getattr(self._snapshot, "within", False):
            if self._snapshot.looked:
                return
            self._snapshot.looked = True
        if self._following or self._seen is None:
            self._look()
        elif self._looking.acquire(blocking=False):
            # One thread waits for the store's answer; the others use the mirror as it is.
            try:
                self._look()
            finally:
                self._looking.release()

    def _look(self) -> None:
        try:
            data = self.remote.index()
            if data is not None and (data != self._seen or self._is_dirty):
                self._catch_up(data)
        except StoreUnavailable as error:
            if self._seen is None and not self._remember():
                raise
            if self._following:
                logger.warning("collection '%s': serving the mirror: %s", self.name, error)
            self._following = False
            self.next_look = time.monotonic() + max(self._follow_seconds, _RETRY_SECONDS)
            return
        self._following = True
        self.next_look = time.monotonic() + self._follow_seconds

    @contextlib.contextmanager
    def snapshot_read(self) -> Iterator[None]:
        if getattr(self._snapshot, "within", False):
            yield
            return
        self._snapshot.within, self._snapshot.looked = True, False
        try:
            yield
        finally:
            self._snapshot.within = False

    def look_again(self) -> bool:
        if not (getattr(self._snapshot, "within", False) and self._snapshot.looked):
            return False
        self._snapshot.looked = False
        return True

    def _catch_up(self, data: bytes) -> None:
        make_directory(self.path)
        # The process that has the lock is bringing the mirror up to date, or is the one writer.
        patience = 0.0 if self._seen is not None or self._remember() else 60.0
        with contextlib.suppress(*([StoreBusy] if self._seen is not None else [])):
            with disk_errors(self.path), writer_lock(self.path / LOCK_FILE, patience):
                # Another process of this host may have pulled a later one before it gave up the lock.
                self._pull(self.remote.index() or data)

    def _remember(self) -> bool:
        """Load the mirror's last index from disk, for use while the store is away; return True if an index exists."""
        with contextlib.suppress(FileNotFoundError, CorruptStore):
            self._adopt(self._index_file.read_bytes())
        return self._seen is not None

    def _adopt(self, data: bytes) -> None:
        self._files = files_of(data, self._index_file)
        self._seen = data

    def _pull(self, data: bytes | None) -> None:
        """Make the mirror equal to the store, whose index is ``data``; the caller holds the mirror's lock."""
        for attempt in range(_ATTEMPTS):
            files: Files = {} if data is None else files_of(data, Path(self._index_name))
            try:
                self._fetch_documents(files)
                break
            except (FileNotFoundError, CorruptStore) as error:
                # The index may have moved on while its objects were being fetched.
                before, data = data, self.remote.index()
                if data == before or attempt == _ATTEMPTS - 1:
                    raise CorruptStore(
                        f"{self._index_name}: an object that it names is gone or damaged ({error}): restore it"
                    ) from error
        self._prune(files)
        self._is_dirty = False
        if data is None:
            # A store without an index has no objects: forget those uploaded before.
            self._index_file.unlink(missing_ok=True)
            self._files, self._seen = {}, None
        else:
            write_file(self._index_file, data, durable=False)
            self._adopt(data)

    def _fetch_documents(self, files: Files) -> None:
        for path in sorted(files, key=lambda path: path == POINTER_FILE):
            entry, target = files[path], self.path / path
            if _is_data(path) or (target.is_file() and file_sha256(target) == entry["sha256"]):
                continue
            self._fetch(entry, target)

    def _fetch(self, entry: dict[str, Any], target: Path) -> None:
        make_directory(target.parent)
        with appearing(target, durable=False) as partial:
            self.remote.fetch(entry["object"], partial)
            if file_sha256(partial) != entry["sha256"]:
                raise CorruptStore(
                    f"{self._index_name}: object {entry['object']} is damaged (its sha256 is not the index's): "
                    "restore it from a backup, or promote another version"
                )

    def _prune(self, files: Files) -> None:
        """Remove local files that the index does not name."""
        for path in self._local_files():
            if path not in files:
                (self.path / path).unlink(missing_ok=True)
        if self.versions.is_dir():
            for directory in self.versions.iterdir():
                if not directory.name.startswith(".") and not (directory / MANIFEST_FILE).exists():
                    shutil.rmtree(directory, ignore_errors=True)

    # --- writing ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        make_directory(self.path)
        with writer_lock(self.path / LOCK_FILE), self.remote.lock() as lease:
            prepared = self.versions.is_dir()
            self._pull(self.remote.index())
            if prepared:
                self.prepare()
            elif not self.versions.is_dir():
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
        temporary = temporary_beside(self.path / POINTER_FILE)
        try:
            temporary.write_bytes(pointer)
            self._push({POINTER_FILE: temporary})
        finally:
            temporary.unlink(missing_ok=True)

    def _push(self, replaced: dict[str, Path] | None = None) -> None:
        """Upload the mirror's new files and commit an index of them; ``replaced`` overrides files, by path."""
        local = {**self._local_files(), **(replaced or {})}
        files: Files = {}
        for path, file in local.items():
            known = self._files.get(path)
            sha256 = self._sha256(path, file)
            if known is not None and known["sha256"] == sha256:
                files[path] = known
            else:
                name = self.remote.put(path, file, sha256)
                files[path] = {"sha256": sha256, "bytes": file.stat().st_size, "object": name}
        for path, entry in self._files.items():
            # The mirror has all documents, so a missing one was removed. Data files may never have been fetched.
            if path not in files and _is_data(path) and not self._is_unnamed(path, local):
                files[path] = entry
        if files == self._files:
            return
        assert self._lease is not None
        self._lease.check()
        data = encode_index(self.name, files)
        self.remote.commit(data, self._seen, self._lease)
        self._adopt(data)
        for path in files:
            if self.rows_are_remote and is_items_file(PurePosixPath(path).name):
                (self.path / path).unlink(missing_ok=True)
        self._sweep({entry["object"] for entry in files.values()}, self._lease)

    def _sweep(self, named: set[str], lease: Lease) -> None:
        """Remove all objects but ``named`` from the store; the next writer removes those that could not be removed."""
        try:
            self.remote.sweep(named, lease)
            self.unswept = None
        except (StoreUnavailable, StoreBusy) as error:
            # The commit is complete even if this fails.
            self.unswept = "the writer lock ended" if isinstance(error, StoreBusy) else str(error.__cause__ or error)
            logger.warning("collection '%s': the next writer removes what is left over: %s", self.name, self.unswept)

    def _sha256(self, path: str, file: Path) -> str:
        # The writer of a version's file hashed it while it was written; the manifest says what it must be.
        entry = self._entry(path) if _is_data(path) else None
        return file_sha256(file) if entry is None else entry.sha256

    def _entry(self, path: str) -> FileEntry | None:
        """Return the entry of a file in the manifest of its version; None if the manifest does not name it."""
        file = PurePosixPath(path)
        manifest = self.read_manifest(file.parent.name)
        return None if manifest is None else manifest.file(file.name)

    def _items_object(self, version: str) -> str | None:
        manifest = self.read_manifest(version)
        if manifest is None:
            return None
        named = self._named(f"versions/{version}/{manifest.items_file.name}")
        return None if named is None else str(named["object"])

    def _named(self, path: str) -> dict[str, Any] | None:
        """Return the entry of a file in the index; None if the index does not name it."""
        named = self._files.get(path)
        if named is None and self._writer != threading.get_ident():
            # Another process may have updated the shared mirror since this one last looked.
            with contextlib.suppress(StoreUnavailable):
                data = self.remote.index()
                if data is not None:
                    named = files_of(data, Path(self._index_name)).get(path)
        return named

    def _is_unnamed(self, path: str, local: dict[str, Path]) -> bool:
        """Return True if a file's version has expired, or an erasure has replaced the file by another."""
        version = PurePosixPath(path).parent.name
        if f"versions/{version}/{MANIFEST_FILE}" not in local or self._entry(path) is None:
            return True
        return self.is_expired(version)

    def _revert(self) -> None:
        """Remove uncommitted changes from the mirror as far as possible, the rest once the store is back."""
        self._is_dirty = True
        try:
            self._pull(self.remote.index())
        except Exception as error:
            logger.warning("collection '%s': the mirror waits for the store to come back: %s", self.name, error)
            self._prune(self._files)

    # --- rows of versions ------------------------------------------------------------------------------------------

    def lookup_current(self, ids: Any, open_current: Callable[[], VersionReader]) -> Lookup:
        if not self.rows_are_remote:
            return super().lookup_current(ids, open_current)
        latest = self._latest
        if latest is not None:
            try:
                rows = self.remote.lookup(latest[1], ids, latest[0])
            except RowsGone:
                self._latest = None
                raise
            if rows is not None:
                return latest[1].version, *rows
        reader, seen = open_current(), self._seen
        # A version served instead of a damaged one is dropped as soon as the damaged one is restored.
        if seen is not None and reader.version == Pointer.read(self.pointer).version:
            self._latest = seen, reader
        return reader.version, *reader.lookup(ids)

    def data_file(self, version: str, file: FileEntry) -> Path:
        with disk_errors(self.path):
            self._fetch_data(self.versions / version, file)
        return self.versions / version / file.name

    def make_reader(self, version: str, manifest: VersionManifest) -> VersionReader:
        with disk_errors(self.path):
            for file in manifest.files:
                # Most readers need the items alone. A reader of users fetches their file.
                if not (is_users_file(file.name) or (self.rows_are_remote and file == manifest.items_file)):
                    self._fetch_data(self.versions / version, file)
        if not self.rows_are_remote:
            return super().make_reader(version, manifest)
        item_rows = self._items_object(version)
        if item_rows is None:
            raise CorruptStore(f"{self._index_name}: has no item rows of version {version}")
        return self.remote.reader(manifest, item_rows)

    def _fetch_data(self, directory: Path, file: FileEntry) -> None:
        path = directory / file.name
        with contextlib.suppress(CorruptStore):
            verify_file(directory, file)
            return
        named = self._named(path.relative_to(self.path).as_posix())
        if named is None:
            raise CorruptStore(f"{self._index_name}: does not name {path.name} of version {directory.name}")
        try:
            self._fetch({**named, "sha256": file.sha256}, path)
        except FileNotFoundError as error:
            raise CorruptStore(f"{self._index_name}: object {named['object']} is gone: restore it") from error
        mark_verified(directory, file)

    # --- names -----------------------------------------------------------------------------------------------------

    def _local_files(self) -> dict[str, Path]:
        """Return the mirror's files by their path in it, without files that are being written."""
        files = {}
        for folder, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.path).as_posix()
                if not name.startswith(".") and relative not in _OWN_FILES:
                    files[relative] = path
        return files


def _is_data(path: str) -> bool:
    """Return True if a path is a version's data file, which is fetched only when needed, and not a document."""
    return path.startswith("versions/") and not path.endswith("/" + MANIFEST_FILE)
