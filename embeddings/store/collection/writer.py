"""Writing a version: its files are made in a temporary folder, which is then moved into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from embeddings.durable_files import fsync_path, write_file
from embeddings.store.collection.erasure import ERASED_FILES, USERS, CollectionErasure
from embeddings.store.files import Workspace, disk_errors, encode_document
from embeddings.store.generation_maps import GenerationMap, file_of
from embeddings.store.manifest import MANIFEST_FILE, VersionManifest
from embeddings.store.users import users_entry, write_users
from embeddings.store.version import (
    ITEMS_FILE,
    items_of,
    mark_verified,
    num_carried,
    read_arrow,
    write_arrow,
    write_items,
)
from embeddings.store.views import ROTATION_FILE, ViewRegistry, matrix_batch, utc_now
from embeddings.vectors.item_vectors import Array, ItemVectors
from embeddings.vectors.user_vectors import UserVectors

DTYPES = ("float32", "float16")


class CollectionWriter(CollectionErasure):
    """Writes versions; a base class of :class:`Collection`."""

    _registry: ViewRegistry

    def write(
        self,
        items: ItemVectors,
        *,
        parent: str | None = None,
        job: str | None = None,
        anchor_generation: int = 1,
        anchor_version: str | None = None,
        missing: int = 0,
        alignment: Mapping[str, Any] | Callable[[ItemVectors], Mapping[str, Any]] | None = None,
        gate: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
        rotation: Array | None = None,
        maps: Callable[[ItemVectors], Sequence[GenerationMap]] | None = None,
        dtype: Literal["float32", "float16"] = "float32",
        users: UserVectors | None = None,
        users_feature: str = "user",
    ) -> str:
        """Write a new immutable version in state candidate and return its name; the served version does not change.

        The version also gets copies of the frequencies of all views of ``anchor_generation``, and the rows of
        materialized views. Most parameters are optional entries of the manifest with the same name.

        Args:
            items: rows to store unchanged: finite directions; they are read once, in order, in parts.
            parent: the version that the new version was made from.
            job: the job that made this version.
            anchor_generation: the generation whose coordinates the vectors are in.
            anchor_version: the first version of that generation.
            missing: number of ids without a vector.
            alignment: entry of the manifest, or a function that makes it from the written rows (memory-mapped).
            gate: the gate's checks.
            extra: more entries of the manifest.
            rotation: [d, d], the rotation from the model's own coordinates to those of the version, for consumers that
                have vectors of the model.
            maps: a function that makes maps to earlier generations from the written rows; None: there are none.
            dtype: type of the stored vectors; lookups give float32 in any case.
            users: the users of the version, in the coordinates of ``items``; None: it has only items.
            users_feature: feature of the job that has the users' ids.

        Raises:
            ValueError: no rows, or rows that are not finite in ``dtype``.
            IdsErased: ``items`` or ``users`` has ids that were erased.
            StoreFull: the disk, quota or file size limit ended the write.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
        if not len(items):
            raise ValueError(f"collection '{self._files.name}': there is no item vector to publish")
        self.finish_erasure()
        self._refuse_all_erased(items, users)
        with disk_errors(self._files.path):
            self._files.prepare()
            with self._files.writing():
                self._clean()
                workspace = Workspace(self._files.versions)
            with contextlib.closing(workspace):
                files = [write_items(workspace.path / ITEMS_FILE, items, dtype)]
                # From here on use the written rows, so that they are not computed again.
                items = items_of(read_arrow(workspace.path / ITEMS_FILE))
                if users is not None:
                    files += write_users(workspace.path, users, items.keys, dtype)
                views = self._registry.all(anchor_generation)
                files += self._registry.write_into(workspace.path, views, items)
                aligned = alignment(items) if callable(alignment) else alignment
                if rotation is not None:
                    batch = matrix_batch(np.asarray(rotation, "<f8"))
                    files.append(write_arrow(workspace.path / ROTATION_FILE, batch))
                back = [] if maps is None else maps(items)
                for one in back:
                    if not one.reasons:
                        files.append(write_arrow(workspace.path / file_of(one.generation), matrix_batch(one.matrix)))
                with self._files.writing():
                    # Check again: ids may have been erased while the rows were being written.
                    self._refuse_all_erased(items, users)
                    version = self._files.next_version()
                    manifest = VersionManifest(
                        collection=self._files.name,
                        version=version,
                        parent=parent,
                        job=job,
                        created_at=utc_now(),
                        anchor_generation=anchor_generation,
                        anchor_version=anchor_version or version,
                        rows=len(items),
                        carried=num_carried(items),
                        missing=missing,
                        dim=items.dim,
                        dtype=dtype,
                        id_type="int64" if items.keys.dtype.kind == "i" else "string",
                        alignment=dict(aligned or {}),
                        maps=tuple(one.as_dict() for one in back),
                        gate=tuple(dict(check) for check in gate),
                        views=tuple(replace(view, file=None) for view in views),
                        files=tuple(files),
                        users=None if users is None else users_entry(users, users_feature),
                        extra=dict(extra or {}),
                    )
                    write_file(workspace.path / MANIFEST_FILE, encode_document(manifest.to_json()))
                    fsync_path(workspace.path)
                    target = self._files.versions / version
                    os.rename(workspace.path, target)
                    fsync_path(self._files.versions)
                    for file in manifest.files:
                        mark_verified(target, file)
        return version

    def _refuse_all_erased(self, items: ItemVectors, users: UserVectors | None) -> None:
        self._refuse_erased(items.keys)
        if users is not None:
            self._refuse_erased(users.keys, USERS)
            if users.tower is not None:
                for part in ERASED_FILES:
                    self._refuse_erased(users.tower.keys(part), part)

    def clean(self) -> None:
        """Remove files of killed writers, and finish interrupted erasures; ``write`` does this, too."""
        self._files.follow()
        if self._files.path.is_dir():
            with self._files.writing():
                self._clean()
            self.finish_erasure()

    def _clean(self) -> None:
        self._registry.clean()
        self._files.clean()
