"""Documents of a version: the manifest that was written with it, and its state since then."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from embeddings.store.files import CorruptStore, FileEntry
from embeddings.store.view_entry import ViewEntry

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class VersionManifest:
    """The manifest of a version; only an erasure replaces it.

    Attributes:
        anchor_generation: the generation whose coordinates the vectors are in.
        anchor_version: the first version of that generation.
        carried: number of rows with an earlier version's vector.
        missing: number of ids without a vector.
        maps: maps to earlier generations, if the version is the first of its generation
            (embeddings.store.generation_maps).
        erasures: time and number of rows of each erasure of ids.
        users: the version's users, {feature, rows, id_type, unit_items, tower, columns}; None if it has only items.
            ``tower`` describes the query tower (embeddings.vectors.query_tower), ``columns`` the columns of items, if
            there are any.
        extra: every other entry, as it is in the document.
    """

    collection: str
    version: str
    parent: str | None
    job: str | None
    created_at: str
    anchor_generation: int
    anchor_version: str
    rows: int
    carried: int
    missing: int
    dim: int
    dtype: str
    id_type: str
    alignment: Mapping[str, Any]
    gate: tuple[Mapping[str, Any], ...]
    views: tuple[ViewEntry, ...]
    files: tuple[FileEntry, ...]
    maps: tuple[Mapping[str, Any], ...] = ()
    erasures: tuple[Mapping[str, Any], ...] = ()
    users: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: Path) -> VersionManifest:
        """Return the manifest that ``document`` describes; ``where`` is its file, for error messages.

        Raises:
            CorruptStore: a required entry is missing.
        """
        extra = {name: value for name, value in document.items() if name not in _FIELDS}
        known = {name: document[name] for name in document if name in _FIELDS}
        try:
            for name in ("gate", "maps", "erasures"):
                known[name] = tuple(known.get(name, ()))
            known["views"] = tuple(ViewEntry.from_json(view, where) for view in known.get("views", ()))
            known["files"] = tuple(FileEntry(**entry) for entry in known["files"])
            return cls(**known, extra=extra)
        except (KeyError, TypeError) as error:
            raise CorruptStore(f"{where}: is no manifest of a version ({error}): restore it from a backup") from error

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as a document, like the one it was read from, with names sorted."""
        document = {name: getattr(self, name) for name in _FIELDS}
        for name in ("gate", "maps", "erasures"):
            document[name] = list(document[name])
        document["views"] = [view.public() for view in self.views]
        document["files"] = [dict(sorted(file._asdict().items())) for file in self.files]
        for name in ("maps", "erasures"):
            if not document[name]:
                del document[name]
        if self.users is None:
            del document["users"]
        return copy.deepcopy(dict(sorted({**document, **self.extra}.items())))

    def file(self, name: str) -> FileEntry | None:
        """Return the entry of a file; None if the version has no file of that name."""
        return next((file for file in self.files if file.name == name), None)

    @property
    def identity(self) -> str:
        """The identity of the version's rows: it changes if ids are erased, or if the store is created anew."""
        rows = (self.collection, self.version, self.created_at, len(self.erasures))
        return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()

    @property
    def items_file(self) -> FileEntry:
        """The file of item rows."""
        return next(file for file in self.files if is_items_file(file.name))

    @property
    def users_file(self) -> FileEntry | None:
        """The file of user rows; None if the version has only items."""
        if self.users is None:
            return None
        return next((file for file in self.files if file.name.startswith("users")), None)

    @property
    def scored_file(self) -> FileEntry | None:
        """The file of item vectors that only scores use; None if scores use the served vectors."""
        return next((file for file in self.files if file.name.startswith("scored")), None)

    @property
    def columns_file(self) -> FileEntry | None:
        """The file of columns of items; None if the version has none."""
        return next((file for file in self.files if file.name.startswith("columns")), None)

    @property
    def tower_file(self) -> FileEntry | None:
        """The file of the query tower; None if the version has none."""
        return next((file for file in self.files if file.name.startswith("tower")), None)


_FIELDS = frozenset(one.name for one in fields(VersionManifest)) - {"extra"}


@dataclass(frozen=True)
class VersionRecord:
    """A version's manifest, and its state since then.

    Attributes:
        state: candidate, held, published, superseded or expired.
        published_at: time of the last switch to this version.
        override: {reason, key, at} of a promotion against the gate's verdict.
        damaged: description of damage that this process found in the version's files.
    """

    manifest: VersionManifest
    state: str
    reasons: list[str]
    published_at: str | None
    override: dict[str, Any] | None
    damaged: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's document with the version's state."""
        later = {name: getattr(self, name) for name in ("state", "reasons", "published_at", "override", "damaged")}
        return {**self.manifest.to_json(), **later}


def is_items_file(name: str) -> bool:
    """Return True if a version's file holds item rows: ``items.arrow``, or ``items-0001.arrow`` after an erasure."""
    return name.startswith("items") and name.endswith(".arrow")


def is_users_file(name: str) -> bool:
    """Return True if only recommendations read a file of a version: users, scored, columns (.arrow) or tower.onnx.

    After an erasure their names have a number.
    """
    return name.startswith(("users", "scored", "columns", "tower")) and name.endswith((".arrow", ".onnx"))
