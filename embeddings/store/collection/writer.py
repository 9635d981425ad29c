"""Writing a version: made in a folder of its own, and moved into place whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embeddings.durable_files import fsync_path, write_file
from embeddings.store.collection.directory import CollectionDirectory
from embeddings.store.collection.erasure import Erasure
from embeddings.store.files import FileEntry, Workspace, disk_errors, encode_document
from embeddings.store.manifest import MANIFEST_FILE, VersionManifest
from embeddings.store.version import (
    ITEMS_FILE,
    items_of,
    mark_verified,
    num_carried,
    read_arrow,
    write_arrow,
    write_items,
)
from embeddings.store.view_entry import ViewEntry
from embeddings.store.views import ROTATION_FILE, ViewRegistry, matrix_batch, utc_now
from embeddings.vectors.item_vectors import Array, ItemVectors

DTYPES = ("float32", "float16")


@dataclass(frozen=True, kw_only=True)
class NewVersion:
    """What is said of a version that is written; Collection.write has what each part means."""

    parent: str | None
    job: str | None
    anchor_generation: int
    anchor_version: str | None
    missing: int
    alignment: Mapping[str, Any] | Callable[[ItemVectors], Mapping[str, Any]] | None
    gate: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any] | None
    rotation: Array | None
    dtype: str


class CollectionWriter:
    """Writes versions of one collection."""

    def __init__(self, files: CollectionDirectory, registry: ViewRegistry, erasure: Erasure):
        self._files = files
        self._registry = registry
        self._erasure = erasure

    def write(self, items: ItemVectors, new: NewVersion) -> str:
        """Write a new immutable version in state candidate and return its name (see Collection.write)."""
        if new.dtype not in DTYPES:
            raise ValueError(f"dtype '{new.dtype}' is not one of {', '.join(DTYPES)}")
        if not len(items):
            raise ValueError(f"collection '{self._files.name}': there is no item vector to publish")
        self._erasure.finish()
        self._erasure.refuse(items.keys)
        with disk_errors(self._files.path):
            self._files.prepare()
            with self._files.writing():
                self._clean()
                workspace = Workspace(self._files.versions)
            with workspace:
                files = [write_items(workspace.path / ITEMS_FILE, items, new.dtype)]
                # From here on the rows as they were written: what computed them need not do it again.
                items = items_of(read_arrow(workspace.path / ITEMS_FILE))
                views = self._registry.all(new.anchor_generation)
                files += self._registry.write_into(workspace.path, views, items)
                alignment = new.alignment(items) if callable(new.alignment) else new.alignment
                if new.rotation is not None:
                    rotation = matrix_batch(np.asarray(new.rotation, "<f8"))
                    files.append(write_arrow(workspace.path / ROTATION_FILE, rotation))
                with self._files.writing():
                    # Again: somebody may have erased ids while the rows were being written.
                    self._erasure.refuse(items.keys)
                    version = self._files.next_version()
                    manifest = self._manifest(version, new, items, alignment, views, files)
                    self._move_into_place(workspace, manifest)
        return version

    def clean(self) -> None:
        """Remove what killed writers left behind, and finish an erasure that was interrupted."""
        self._files.follow()
        if self._files.path.is_dir():
            with self._files.writing():
                self._clean()
            self._erasure.finish()

    def _clean(self) -> None:
        self._registry.clean()
        self._files.clean()

    def _manifest(
        self,
        version: str,
        new: NewVersion,
        items: ItemVectors,
        alignment: Mapping[str, Any] | None,
        views: Sequence[ViewEntry],
        files: Sequence[FileEntry],
    ) -> VersionManifest:
        return VersionManifest(
            collection=self._files.name,
            version=version,
            parent=new.parent,
            job=new.job,
            created_at=utc_now(),
            anchor_generation=new.anchor_generation,
            anchor_version=new.anchor_version or version,
            rows=len(items),
            carried=num_carried(items),
            missing=new.missing,
            dim=items.dim,
            dtype=new.dtype,
            id_type="int64" if items.keys.dtype.kind == "i" else "string",
            alignment=dict(alignment or {}),
            gate=tuple(dict(check) for check in new.gate),
            views=tuple(replace(view, file=None) for view in views),
            files=tuple(files),
            extra=dict(new.extra or {}),
        )

    def _move_into_place(self, workspace: Workspace, manifest: VersionManifest) -> None:
        write_file(workspace.path / MANIFEST_FILE, encode_document(manifest.to_json()))
        fsync_path(workspace.path)
        target = self._files.versions / manifest.version
        os.rename(workspace.path, target)
        fsync_path(self._files.versions)
        for file in manifest.files:
            mark_verified(target, file)
