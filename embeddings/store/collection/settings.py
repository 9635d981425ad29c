"""Settings of a collection: small documents, each with a kind (such as probe) and a name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from embeddings.durable_files import fsync_path, make_directory
from embeddings.store.collection.directory import NAME_PATTERN, CollectionDirectory
from embeddings.store.files import disk_errors, read_document, replace_document
from embeddings.store.tombstones import ErasedIds
from embeddings.store.view_entry import ANCHORS
from embeddings.vectors.item_vectors import keys_of

LISTS_BY_ITEM = {"canary": ("ids", "codes", "held_out"), ANCHORS: ("ids", "coordinates")}
"""Names of lists with one entry per item in settings that list items, by kind of settings; the ids come first.

This module lists the kinds, although other packages save them, because every process that erases must know all kinds.
With registration by import, a package that was not imported would keep erased ids.
"""


class CollectionSettings:
    """The settings of a collection, each replaced in one durable step; a part of :class:`Collection`."""

    _files: CollectionDirectory

    def settings(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the collection's settings of one kind (``canary``, say), keyed by name."""
        self._files.follow()
        documents = {
            path.stem: read_document(path) for path in sorted((self._files.path / "settings" / kind).glob("*.json"))
        }
        return {name: document for name, document in documents.items() if document is not None}

    def save_settings(self, kind: str, name: str, document: Mapping[str, Any] | None) -> None:
        """Save the document of a kind and name; None removes it."""
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
        """Remove erased ids from the settings that list items."""
        for kind, lists in LISTS_BY_ITEM.items():
            for name, document in self.settings(kind).items():
                ids = document.get(lists[0])
                if ids and not (staying := ~erased.matches(keys_of(ids))).all():
                    shorter = {part: list(itertools.compress(document[part], staying)) for part in lists}
                    CollectionSettings.save_settings(self, kind, name, {**document, **shorter})
