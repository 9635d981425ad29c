"""Erasure: ids leave the current and all kept versions of a collection, and do not come back by themselves.

    COLLECTION/erased.json    hashes of the erased ids, what is under way, and when what was erased and why
               ERASING        the lock of the process that erases

First the hashes are recorded, and from then on no version with such an id can be written. Then each version that has
one gets a new file of item rows without them, made beside the old one, and a manifest that names it: replacing the
manifest is the switch of that version. The old file is removed; readers that have it mapped finish with it. Last
CURRENT says that there was an erasure, whereupon every process drops what it has mapped and remembered. A process that
is killed on the way has recorded what it was about: the next writer, ``Collection.clean`` and the start of the service
finish it, from the hashes alone.

Probes lose the ids and their labels. Rows of materialized views are removed with the items; such a view is computed
when it is fetched from then on. Checkpoints of runs, training data and what consumers have fetched are not the store's:
they are the caller's to erase.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embeddings.durable_files import fsync_path
from embeddings.store.files import (
    CorruptStore,
    StoreBusy,
    StoreError,
    UnknownVersion,
    Workspace,
    disk_errors,
    read_document,
    replace_document,
    writer_lock,
)
from embeddings.store.tombstones import ErasedIds
from embeddings.store.version import count_statuses, write_items
from embeddings.store.views import utc_now
from embeddings.vectors.item_vectors import Array, ItemIdError, ItemVectors, keys_of
from embeddings.vectors.lazy_rows import Picked

if TYPE_CHECKING:
    from embeddings.store.collection import Collection
    from embeddings.store.feature_store import Store

ERASED_FILE = "erased.json"
LOCK_FILE = "ERASING"
LOCK_SECONDS = 600.0
LOG_LENGTH = 1000
MANIFEST = "manifest.json"
# What a version keeps beside its item rows; of everything else nobody can say that no row is in it.
_WITHOUT_ROWS = ("frequencies-", "rotation")
SETTINGS_BY_ITEM = {"canary": ("ids", "codes", "held_out")}
"""Settings of a collection that name items, by kind, and their lists with an entry for each item, ids first."""


class IdsErased(StoreError):
    """Rows of ids that were erased cannot be written."""


# --- what was erased -------------------------------------------------------------------------------------------------


def erased_ids(collection: Collection) -> ErasedIds:
    """Return the erased ids of a collection."""
    document = _read(collection)
    return ErasedIds() if document is None else ErasedIds.of(document)


def erasures(collection: Collection) -> list[dict[str, Any]]:
    """Return what was erased and readmitted, oldest first: {at, kind: erase|readmit, reason, key, ids, rows, versions}.

    The last may be under way: it has no ``rows`` yet.
    """
    document = _read(collection) or {"log": [], "pending": []}
    return [*document["log"], *document["pending"]]


def refuse_erased(collection: Collection, keys: Array) -> None:
    """Raise IdsErased if one of ``keys`` was erased."""
    found = int(np.count_nonzero(erased_ids(collection).matches(keys)))
    if found:
        raise IdsErased(
            f"collection '{collection.name}': {found} of the ids were erased: leave them out, or readmit them first"
        )


# --- erasing ---------------------------------------------------------------------------------------------------------


def erase(collection: Collection, ids: Any, reason: str, *, key: str | None = None) -> dict[str, Any]:
    """Erase the rows of ``ids`` from every kept version, and keep them out until they are readmitted.

    What is interrupted is finished by the next writer.

    Args:
        collection: the collection to erase from.
        ids: of the collection's type; ids that no version has are kept out all the same.
        reason: kept with the erasure.
        key: the id of the API key that asked for it.

    Returns:
        {"versions": the versions that were rewritten, "rows": how many rows they lost}.

    Raises:
        UnknownCollection: the collection has no version.
        ItemIdError: ids of another type.
        ValueError: there is no reason.
        StoreBusy: another process kept the lock for too long.
        StoreFull: the disk, quota or file size limit ended a write.
        CorruptStore: the current version cannot be read.
    """
    keys = _checked(collection, ids, reason)
    with disk_errors(collection.directory), _erasing(collection):
        note = {"at": utc_now(), "kind": "erase", "reason": reason, "key": key, "ids": len(keys)}
        with collection.writing():
            document = _read(collection)
            known = ErasedIds() if document is None else ErasedIds.of(document)
            _write(collection, document, known.adding(keys), pending=note)
        return _finish(collection)


def readmit(collection: Collection, ids: Any, reason: str, *, key: str | None = None) -> int:
    """Let erased ids be published again, and return how many of them were erased.

    What was erased stays so: the next run that finds them brings them back. Raises as ``erase`` does.
    """
    keys = _checked(collection, ids, reason)
    with disk_errors(collection.directory), _erasing(collection):
        _finish(collection)
        with collection.writing():
            document = _read(collection)
            if document is None:
                return 0
            known = ErasedIds.of(document)
            left = known.without(keys)
            number = len(known) - len(left)
            note = {"at": utc_now(), "kind": "readmit", "reason": reason, "key": key, "ids": number}
            _write(collection, document, left, done=note if number else None)
    return number


def finish_erasure(collection: Collection) -> None:
    """Finish an erasure that was interrupted; do nothing where there is none, or another process is at it."""
    document = _read(collection)
    if document is None or not document["pending"]:
        return
    with disk_errors(collection.directory), contextlib.suppress(StoreBusy), _erasing(collection, timeout_seconds=0.0):
        _finish(collection)


def finish_erasures(store: Store) -> None:
    """Finish interrupted erasures of every collection."""
    for name in store.collections():
        finish_erasure(store.collection(name))


def shorten_settings(collection: Collection, erased: ErasedIds) -> None:
    """Take erased ids out of the settings that name items."""
    for kind, lists in SETTINGS_BY_ITEM.items():
        for name, document in collection.settings(kind).items():
            kept = ~erased.matches(keys_of(document[lists[0]])) if document[lists[0]] else np.ones(0, dtype=bool)
            if not kept.all():
                shorter = {part: [x for x, keep in zip(document[part], kept, strict=True) if keep] for part in lists}
                collection.save_settings(kind, name, {**document, **shorter})


def _finish(collection: Collection) -> dict[str, Any]:
    """Rewrite what has to be, and say so in the log; under the lock of the process that erases."""
    document = _read(collection)
    if document is None or not document["pending"]:
        return {"versions": [], "rows": 0}
    known = ErasedIds.of(document)
    shorten_settings(collection, known)
    rewritten: dict[str, int] = {}
    # A version that was being written when the ids were recorded is refused when it comes to be committed.
    for manifest in collection.versions():
        if manifest["state"] != "expired":
            num_rows = _rewrite(collection, manifest["version"], known)
            if num_rows:
                rewritten[manifest["version"]] = num_rows
    done = {"versions": list(rewritten), "rows": sum(rewritten.values())}
    with collection.writing():
        # Also where this process rewrote nothing: the one that was killed may have.
        collection.count_erasure()
        document = _read(collection)
        assert document is not None
        pending = document["pending"]
        notes = [{**note, "versions": [], "rows": 0} for note in pending[:-1]] + [{**pending[-1], **done}]
        _write(collection, {**document, "log": [*document["log"], *notes], "pending": []}, ErasedIds.of(document))
    return done


def _rewrite(collection: Collection, version: str, known: ErasedIds) -> int:
    """Give a version new item rows without the erased ids, and return how many rows that takes away.

    The rows are read and written without the writer lock, a part at a time.
    """
    while True:
        before = collection.stored_manifest(version)
        try:
            # By retention since it was listed; a reader of it that this process has may be open still.
            if collection.manifest(version)["state"] == "expired":
                return 0
            items = collection.open(version).items()
        except UnknownVersion:
            return 0
        except CorruptStore:
            if collection.current() == version:
                raise
            # Nobody can serve it, and nobody can say whose rows are in it.
            collection.expire(version)
            return 0
        gone = known.matches(items.keys)
        if not (gone.any() or collection.versions_share_rows):
            directory = collection.version_directory(version)
            if _unnamed(directory, before):
                with collection.writing():
                    _remove_unnamed(directory, collection.stored_manifest(version))
            return 0
        with collection.writing():
            workspace = Workspace(collection.version_directory(version).parent)
        with workspace:
            number = 1 + len(before.get("erasures", []))
            kept = _rows_of(items, np.flatnonzero(~gone))
            entry = write_items(workspace.path / f"items-{number:04d}.arrow", kept, before["dtype"])
            with collection.writing():
                # Retention, or an eraser on another machine, may have been faster.
                if collection.stored_manifest(version) != before or collection.manifest(version)["state"] == "expired":
                    continue
                after = _manifest_after(before, entry, kept, int(np.count_nonzero(gone)))
                directory = collection.version_directory(version)
                os.rename(workspace.path / entry["name"], directory / entry["name"])
                fsync_path(directory)
                collection.replace_manifest(version, after)
                _remove_unnamed(directory, after)
            return int(np.count_nonzero(gone))


def _rows_of(items: ItemVectors, rows: Array) -> ItemVectors:
    def picked(column: Array | None) -> Array | None:
        return None if column is None else column[rows]

    return ItemVectors(
        items.keys[rows], Picked(items.vectors, rows), norms=items.norms[rows], evidence=items.evidence[rows],
        counts=picked(items.counts), statuses=items.statuses[rows], carried_for=picked(items.carried_for),
        last_found=picked(items.last_found),
    )  # fmt: skip


def _manifest_after(before: dict[str, Any], entry: dict[str, Any], kept: ItemVectors, num_rows: int) -> dict[str, Any]:
    return {
        **before,
        **count_statuses(kept),
        "files": [entry, *(file for file in before["files"] if file["name"].startswith(_WITHOUT_ROWS))],
        "views": [{**view, "materialized": False} for view in before["views"]],
        "erasures": [*before.get("erasures", []), {"at": utc_now(), "rows": num_rows}],
    }


def _remove_unnamed(directory: Path, manifest: dict[str, Any]) -> None:
    """Remove files of a version that its manifest does not name.

    These are what it had before an erasure, and manifests that were not finished.
    """
    for path in _unnamed(directory, manifest):
        path.unlink(missing_ok=True)
    fsync_path(directory)


def _unnamed(directory: Path, manifest: dict[str, Any]) -> list[Path]:
    named = {MANIFEST, *(file["name"] for file in manifest["files"])}
    visible = [path for path in directory.iterdir() if path.name not in named and not path.name.startswith(".")]
    return [*visible, *directory.glob(f".tmp-{MANIFEST}-*")]


# --- the document ----------------------------------------------------------------------------------------------------


def _checked(collection: Collection, ids: Any, reason: str) -> Array:
    if not reason.strip():
        raise ValueError("a reason is kept with what is erased; say why")
    keys = np.unique(keys_of(ids))
    if not len(keys):
        raise ItemIdError("there are no ids to erase")
    kind = "int64" if keys.dtype.kind == "i" else "string"
    wanted = collection.id_type()
    if kind != wanted:
        raise ItemIdError(f"the ids of collection '{collection.name}' are {wanted}, those given are {kind}")
    return keys


def _read(collection: Collection) -> dict[str, Any] | None:
    # A collection that lies elsewhere is looked at now.
    collection.current()
    return read_document(collection.directory / ERASED_FILE)


def _write(
    collection: Collection,
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
    replace_document(collection.directory / ERASED_FILE, after)


@contextlib.contextmanager
def _erasing(collection: Collection, timeout_seconds: float | None = None) -> Iterator[None]:
    patience = LOCK_SECONDS if timeout_seconds is None else timeout_seconds
    with writer_lock(collection.directory / LOCK_FILE, patience):
        yield
