"""Erasure: ids are removed from the current and all kept versions of a collection, and kept out of later versions.

    COLLECTION/erased.json          hashes of the erased ids, pending erasures, and a log of finished ones with reasons
               erased-users.json    the same for users, whose ids may equal those of items
               ERASING              the lock of the erasing process, one on each machine

First the hashes are recorded; from then on no version with such an id can be written. Then each version that has such
ids gets a new file of rows without them, and a new manifest that names the file. Replacing the manifest is atomic. If
items were erased, the users' file is replaced too, because it lists the items that each user had. The old files are
removed; readers that have mapped them can finish. Last, CURRENT counts the erasure, and every process that sees this
drops its mapped files and remembered manifests.

If a process is killed on the way, the next writer, ``Collection.clean`` or the start of the service finishes the
erasure from the recorded hashes. With a remote store several machines may erase at once: each concludes only erasures
that were pending when it began, and repeats until none is pending.

Probes lose the ids and their labels. Rows of materialized views are removed with the items; afterwards such a view is
computed when it is fetched. Checkpoints, training data and copies that consumers have fetched are outside the store:
the caller must erase them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embeddings.durable_files import fsync_path, make_directory
from embeddings.store.collection.directory import NAME_PATTERN
from embeddings.store.collection.switch import VersionSwitch
from embeddings.store.files import (
    CorruptStore,
    FileEntry,
    IdsErased,
    StoreBusy,
    StoreUnavailable,
    UnknownVersion,
    Workspace,
    disk_errors,
    read_document,
    replace_document,
    writer_lock,
)
from embeddings.store.generation_maps import MAP_PREFIX
from embeddings.store.manifest import MANIFEST_FILE, VersionManifest, is_items_file, is_users_file
from embeddings.store.tombstones import ErasedIds
from embeddings.store.users import write_users
from embeddings.store.version import VersionReader, num_carried, write_items
from embeddings.store.view_entry import ANCHORS
from embeddings.store.views import utc_now
from embeddings.vectors.item_vectors import Array, ItemIdError, ItemVectors, keys_of
from embeddings.vectors.lazy_rows import Picked
from embeddings.vectors.query_tower import QueryTower
from embeddings.vectors.user_vectors import UserVectors

Part = Literal["items", "users"]
ITEMS: Part = "items"
USERS: Part = "users"
ERASED_FILES: dict[Part, str] = {ITEMS: "erased.json", USERS: "erased-users.json"}
LISTS_BY_ITEM = {"canary": ("ids", "codes", "held_out"), ANCHORS: ("ids", "coordinates")}
"""Names of lists with one entry per item in settings that list items, by kind of settings; the ids come first.

This module lists the kinds, although other packages save them, because every process that erases must know all kinds.
With registration by import, a package that was not imported would keep erased ids.
"""
LOCK_FILE = "ERASING"
LOCK_SECONDS = 600.0
LOG_LENGTH = 1000
# Prefixes of a version's files that hold no item rows; any other file may hold some.
_WITHOUT_ROWS = ("frequencies-", "rotation", MAP_PREFIX)


class CollectionErasure(VersionSwitch):
    """Erases ids from a collection and its settings, and recognizes them; a base class of :class:`Collection`."""

    # --- erased ids ------------------------------------------------------------------------------------------------

    def erased(self, part: Part = ITEMS) -> ErasedIds:
        """Return the set of erased item ids, or of erased user ids. No version may contain them."""
        document = self._erased_document(part)
        return ErasedIds() if document is None else ErasedIds.of(document)

    def erasures(self) -> list[dict[str, Any]]:
        """Return the log of erased and readmitted ids, oldest first; ids are known only by hash.

        Each entry is {at, kind: erase|readmit, reason, key, ids, rows, versions}; of users it also has ``part: users``.
        Entries of unfinished erasures come last and have no ``rows`` yet.
        """
        found: dict[str, list[dict[str, Any]]] = {"log": [], "pending": []}
        for part in ERASED_FILES:
            document = self._erased_document(part) or {}
            for kind, notes in found.items():
                notes += [{**note, **({} if part == ITEMS else {"part": part})} for note in document.get(kind, ())]
        notes = [note for kind in found.values() for note in sorted(kind, key=lambda note: str(note["at"]))]
        return [{name: value for name, value in note.items() if name != "token"} for note in notes]

    def num_erasures(self) -> int:
        """Return the number of erasures so far, by any process.

        When it changes, copies of rows that were made outside the store may contain erased ids.
        """
        return self._files.pointer.read().erasures

    def _refuse_erased(self, keys: Array, part: Part = ITEMS) -> None:
        num_erased = int(np.count_nonzero(self.erased(part).matches(keys)))
        if num_erased:
            raise IdsErased(
                f"collection '{self._files.name}': {num_erased} of the {'ids' if part == ITEMS else 'users'} were "
                "erased: leave them out, or readmit them first"
            )

    # --- settings: small documents, each with a kind (such as canary) and a name --------------------------------------

    def settings(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the collection's settings of one kind (``canary``, say), keyed by name."""
        self._files.follow()
        documents = {
            path.stem: read_document(path) for path in sorted((self._files.path / "settings" / kind).glob("*.json"))
        }
        return {name: document for name, document in documents.items() if document is not None}

    def save_settings(self, kind: str, name: str, document: Mapping[str, Any] | None) -> None:
        """Save a settings document of finite JSON values in one durable step; None removes the document.

        If settings of this ``kind`` list items, erased ids are removed from the lists.

        Raises:
            ValueError: a name that is not ``[a-z0-9][a-z0-9_-]{0,62}``.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        self._replace_settings(kind, name, document)
        if kind in LISTS_BY_ITEM and document is not None:
            # Remove ids that were erased while the document was written; later erasures find the saved document.
            self._remove_items(self.erased())

    def _replace_settings(self, kind: str, name: str, document: Mapping[str, Any] | None) -> None:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"{kind} name {name!r}: use [a-z0-9][a-z0-9_-]{{0,62}}")
        directory = self._files.path / "settings" / kind
        with disk_errors(self._files.path), self._files.writing():
            make_directory(directory)
            path = directory / f"{name}.json"
            if document is None:
                path.unlink(missing_ok=True)
                fsync_path(directory)
            else:
                replace_document(path, dict(document))

    def _remove_items(self, erased: ErasedIds) -> None:
        for kind, lists in LISTS_BY_ITEM.items():
            for name, document in self.settings(kind).items():
                ids = document.get(lists[0])
                if ids and not (staying := ~erased.matches(keys_of(ids))).all():
                    shorter = {part: list(itertools.compress(document[part], staying)) for part in lists}
                    self._replace_settings(kind, name, {**document, **shorter})

    # --- erasing ---------------------------------------------------------------------------------------------------

    def erase(self, ids: Any, reason: str, *, key: str | None = None, part: Part = ITEMS) -> dict[str, Any]:
        """Erase the rows of ``ids`` from every kept version, and keep them out until they are readmitted.

        If this is interrupted, the next writer finishes it.

        Args:
            ids: ids of the part's type; ids that no version has are kept out, too.
            reason: reason that the log keeps.
            key: the id of the API key of the request.
            part: ``items`` or ``users``.

        Returns:
            {"versions": names of the rewritten versions, "rows": number of rows that they lost}.

        Raises:
            UnknownCollection: the collection has no version.
            NoUsers: ids of users, and no version has users.
            ItemIdError: ids of another type.
            ValueError: the reason is empty.
            StoreBusy: another process held the lock for too long.
            StoreFull: the disk, quota or file size limit ended a write.
            CorruptStore: the current version cannot be read.
        """
        keys = self._checked(ids, reason, part)
        with disk_errors(self._files.path), self._erasing():
            # The token identifies the pending entry, whichever machine finishes it.
            token = secrets.token_hex(8)
            note = {"at": utc_now(), "kind": "erase", "reason": reason, "key": key, "ids": len(keys), "token": token}
            with self._files.writing():
                document = self._erased_document(part)
                known = ErasedIds() if document is None else ErasedIds.of(document)
                self._write_erased(part, document, known.adding(keys), pending=note)
            self._finish(part, token)
            return self._outcome(part, token)

    def readmit(self, ids: Any, reason: str, *, key: str | None = None, part: Part = ITEMS) -> int:
        """Let erased ids be published again, and return how many of them were erased.

        Rows that were erased stay erased; the ids return with the next run that has them. Raises as ``erase`` does.
        """
        keys = self._checked(ids, reason, part)
        with disk_errors(self._files.path), self._erasing():
            self._finish(part)
            with self._files.writing():
                document = self._erased_document(part)
                if document is None:
                    return 0
                known = ErasedIds.of(document)
                left = known.without(keys)
                number = len(known) - len(left)
                note = {"at": utc_now(), "kind": "readmit", "reason": reason, "key": key, "ids": number}
                self._write_erased(part, document, left, done=note if number else None)
        return number

    def finish_erasure(self) -> None:
        """Finish interrupted erasures; do nothing if there are none, or if another process is finishing them."""
        documents = [(part, self._erased_document(part)) for part in ERASED_FILES]
        pending = [part for part, document in documents if document is not None and document["pending"]]
        if not pending:
            return
        with disk_errors(self._files.path), contextlib.suppress(StoreBusy), self._erasing(timeout_seconds=0.0):
            for part in pending:
                self._finish(part)

    def _finish(self, part: Part, own: str | None = None) -> None:
        """Carry out pending erasures until none is left; the caller holds this machine's lock of the erasing process.

        ``own`` is the token of the caller's own entry in the list of pending erasures.
        """
        while (document := self._erased_document(part)) is not None and document["pending"]:
            self._carry_out(part, document, own)

    def _carry_out(self, part: Part, document: dict[str, Any], own: str | None) -> None:
        """Rewrite versions and settings for all erasures pending in ``document``, and move these to the log."""
        taken, known = document["pending"], ErasedIds.of(document)
        if part == ITEMS:
            self._remove_items(known)
        lost: dict[str, int] = {}
        # A version that was being written when the ids were recorded is refused at its commit.
        versions = self._kept_versions()
        while versions:
            lost |= {version: self._rewrite(version, known, part) for version in versions}
            versions, known = self._committed_since(part, taken, lost)
        with self._files.writing():
            # Count it even if this process rewrote nothing: a killed one may have rewritten versions.
            self._files.pointer.count_erasure()
            self._conclude(part, taken, own, {version: num_rows for version, num_rows in lost.items() if num_rows})
        if self._files.unswept is not None:
            raise StoreUnavailable(
                f"collection '{self._files.name}': the ids are no longer served, but objects with their rows are in "
                f"the store until it can be reached ({self._files.unswept}): erase them again"
            )

    def _kept_versions(self) -> list[str]:
        return [record.manifest.version for record in self._reader.records() if record.state != "expired"]

    def _committed_since(
        self, part: Part, taken: list[dict[str, Any]], seen: Container[str]
    ) -> tuple[list[str], ErasedIds]:
        """Return more versions to rewrite, those not in ``seen``, and the set of ids that are erased now.

        There are none in a local store. In a remote store, a version's rows may depend on rows that an earlier version
        had before it was rewritten, and so keep these alive.
        """
        with self._files.writing():
            document = self._erased_document(part)
            assert document is not None
            is_ours = any(note in taken for note in document["pending"])
            versions = self._kept_versions() if self._files.rows_are_remote and is_ours else []
            return [version for version in versions if version not in seen], ErasedIds.of(document)

    def _conclude(self, part: Part, taken: list[dict[str, Any]], own: str | None, rewritten: dict[str, int]) -> None:
        """Move the pending entries ``taken`` to the log, unless another machine did; the caller holds the writer lock.

        What was rewritten is recorded in the caller's own entry (``own``) if it was taken, else in the latest.
        """
        document = self._erased_document(part)
        assert document is not None
        ended = [{**note, "versions": [], "rows": 0} for note in document["pending"] if note in taken]
        pending = [note for note in document["pending"] if note not in taken]
        log = [*document["log"], *ended]
        told = next((note for note in taken if own is not None and note.get("token") == own), taken[-1])
        for number in range(len(log)):
            if log[number].items() >= told.items():
                versions = list(dict.fromkeys([*log[number]["versions"], *rewritten]))
                num_rows = log[number]["rows"] + sum(rewritten.values())
                log[number] = {**log[number], "versions": versions, "rows": num_rows}
        self._write_erased(part, {**document, "log": log, "pending": pending}, ErasedIds.of(document))

    def _outcome(self, part: Part, token: str) -> dict[str, Any]:
        """Return {versions, rows} from the log entry of an erasure, whichever machine finished it."""
        document = self._erased_document(part)
        notes = [] if document is None else document["log"]
        note = next((note for note in reversed(notes) if note.get("token") == token), {"versions": [], "rows": 0})
        return {"versions": note["versions"], "rows": note["rows"]}

    def _rewrite(self, version: str, known: ErasedIds, part: Part) -> int:
        """Give a version new files without the rows of the erased ids, and return the number of rows removed."""
        directory = self._files.versions / version
        while True:
            before = self._reader.manifest_now(version)
            try:
                # The version may have expired since it was listed, although this process still has a reader of it.
                if self._is_expired(version):
                    return 0
                reader = self._reader.open(version)
                if reader.manifest != before:
                    # Another machine has rewritten it since it was opened: its rows must not come back.
                    self._reader.forget(version)
                    continue
                items = reader.items()
                users = self._users(reader)
            except UnknownVersion:
                return 0
            except CorruptStore:
                if self._files.pointer.read().version == version:
                    raise
                # A damaged version cannot be served, and may hold erased rows.
                self.expire(version)
                return 0
            if part == USERS:
                gone = known.matches(users.keys) if users is not None else np.zeros(0, dtype=np.bool_)
            else:
                gone = known.matches(items.keys)
            tower = None if users is None or users.tower is None else users.tower.without(part, known.matches)
            # A tower has rows of users and items that the version itself does not have.
            loses = bool(gone.any()) or (users is not None and tower is not users.tower)
            # Remote rows of a version may depend on those of an earlier one, so all of them are written again.
            writes_items = part == ITEMS and (bool(gone.any()) or self._files.rows_are_remote)
            if not (loses or writes_items):
                if _unnamed(directory, before):
                    with self._files.writing():
                        _remove_unnamed(directory, self._reader.manifest_now(version))
                return 0
            with self._files.writing():
                workspace = Workspace(self._files.versions)
            with contextlib.closing(workspace):
                suffix, files = f"-{1 + len(before.erasures):04d}", []
                remaining = np.flatnonzero(~gone)
                if writes_items:
                    items = items.take(remaining)
                    files.append(write_items(workspace.path / f"items{suffix}.arrow", items, before.dtype))
                if users is not None:
                    users = replace(users, tower=tower)
                    if part == USERS:
                        users = users.take(remaining)
                    elif users.scored is not None:
                        users = replace(users, scored=Picked(users.scored, remaining))
                    files += write_users(workspace.path, users, items.keys, before.dtype, suffix)
                with self._files.writing():
                    # Retention, or an eraser on another machine, may have been faster.
                    if self._reader.manifest_now(version) != before or self._is_expired(version):
                        continue
                    after = _manifest_after(before, files, items, users, int(np.count_nonzero(gone)))
                    for file in files:
                        os.rename(workspace.path / file.name, directory / file.name)
                    fsync_path(directory)
                    replace_document(directory / MANIFEST_FILE, after.to_json())
                    self._reader.forget(version)
                    _remove_unnamed(directory, after)
                return int(np.count_nonzero(gone))

    def _users(self, reader: VersionReader) -> UserVectors | None:
        if reader.manifest.users_file is None:
            return None
        recommender = self._reader.recommender(reader.version)
        tower = recommender.tower
        return recommender.users if tower is None else replace(recommender.users, tower=QueryTower(tower.to_pybytes()))

    def _is_expired(self, version: str) -> bool:
        return self._reader.record(version).state == "expired"

    # --- the document ----------------------------------------------------------------------------------------------

    def _checked(self, ids: Any, reason: str, part: Part) -> Array:
        if not reason.strip():
            raise ValueError("a reason is kept with what is erased; say why")
        keys = np.unique(keys_of(ids))
        if not len(keys):
            raise ItemIdError("there are no ids to erase")
        given = "int64" if keys.dtype.kind == "i" else "string"
        stored = self._reader.id_type() if part == ITEMS else self._reader.user_id_type()
        if given != stored:
            whose = "" if part == ITEMS else "of users "
            raise ItemIdError(
                f"the ids {whose}of collection '{self._files.name}' are {stored}, those given are {given}"
            )
        return keys

    def _erased_document(self, part: Part) -> dict[str, Any] | None:
        self._files.follow()
        return read_document(self._files.path / ERASED_FILES[part])

    def _write_erased(
        self,
        part: Part,
        document: dict[str, Any] | None,
        known: ErasedIds,
        *,
        pending: dict[str, Any] | None = None,
        done: dict[str, Any] | None = None,
    ) -> None:
        before = document or {"log": [], "pending": []}
        after = {
            **known.as_dict(),
            "log": [*before["log"], *([done] if done else [])][-LOG_LENGTH:],
            "pending": [*before["pending"], *([pending] if pending else [])],
        }
        replace_document(self._files.path / ERASED_FILES[part], after)

    def _erasing(self, timeout_seconds: float | None = None) -> contextlib.AbstractContextManager[None]:
        patience = LOCK_SECONDS if timeout_seconds is None else timeout_seconds
        return writer_lock(self._files.path / LOCK_FILE, patience)


def _manifest_after(
    before: VersionManifest, files: Sequence[FileEntry], items: ItemVectors, users: UserVectors | None, num_rows: int
) -> VersionManifest:
    """Return the manifest with the new ``files``; rows of materialized views go with rewritten items."""
    with_items = any(is_items_file(file.name) for file in files)
    staying = [
        file
        for file in before.files
        if file.name.startswith(_WITHOUT_ROWS) or not (with_items or is_users_file(file.name))
    ]
    return replace(
        before,
        rows=len(items),
        carried=num_carried(items),
        files=(*files, *staying),
        users=None if before.users is None or users is None else {**before.users, "rows": len(users)},
        views=tuple(replace(view, materialized=view.materialized and not with_items) for view in before.views),
        erasures=(*before.erasures, {"at": utc_now(), "rows": num_rows}),
    )


def _remove_unnamed(directory: Path, manifest: VersionManifest) -> None:
    """Remove files from before an erasure, and unfinished manifests."""
    for path in _unnamed(directory, manifest):
        path.unlink(missing_ok=True)
    fsync_path(directory)


def _unnamed(directory: Path, manifest: VersionManifest) -> list[Path]:
    named = {MANIFEST_FILE, *(file.name for file in manifest.files)}
    visible = [path for path in directory.iterdir() if path.name not in named and not path.name.startswith(".")]
    return [*visible, *directory.glob(f".tmp-{MANIFEST_FILE}-*")]
