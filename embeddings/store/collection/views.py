"""Views of a collection at one of its versions; their entries and files are embeddings.store.views'."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from embeddings.rff import RandomFourierFeatures
from embeddings.store.collection.directory import NAME_PATTERN, CollectionDirectory
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.files import UnknownView, ViewExists, disk_errors
from embeddings.store.view_entry import ViewEntry
from embeddings.store.views import ViewRegistry, define_view
from embeddings.vectors.item_vectors import Array

if TYPE_CHECKING:
    from embeddings.store.feature_store import Store


class CollectionViews:
    """The views of one collection; what its methods raise stands with those of Collection that call them."""

    def __init__(self, files: CollectionDirectory, reader: CollectionReader, registry: ViewRegistry, store: Store):
        self._files = files
        self._reader = reader
        self._registry = registry
        self._store = store

    # --- which there are -------------------------------------------------------------------------------------------

    def all(self, version: str) -> list[dict[str, Any]]:
        """Return the views that can be fetched at a version, by name; none before the first version."""
        if version == "current" and self._files.pointer.read().version is None:
            return []
        return [view.public() for view in self._registry.all(self._reader.anchor_generation(version))]

    def get(self, name: str, version: str) -> dict[str, Any]:
        """Return a view at a version."""
        return self._entry(name, version).public()

    def names(self) -> list[str]:
        """Return names of views in any anchor generation."""
        self._files.follow()
        return self._registry.names()

    def is_known(self, name: str) -> bool:
        """Return True if a name is among :meth:`names`, as far as this machine has seen: one look at one folder."""
        return self._registry.known(name)

    def has(self, name: str, anchor_generation: int) -> bool:
        """Return True if a view is defined for an anchor generation."""
        self._files.follow()
        return name in {view.name for view in self._registry.all(anchor_generation)}

    # --- defining --------------------------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        *,
        dim_in: int | None = None,
        anchor_generation: int | None = None,
        materialized: bool = False,
        **parameters: Any,
    ) -> dict[str, Any]:
        """Create a view, for the current anchor generation where none is given."""
        if dim_in is None or anchor_generation is None:
            dim_in, anchor_generation = self._current_coordinates()
        defined = define_view(name, dim_in, **parameters)
        self._check_name(name)
        with disk_errors(self._files.path):
            self._files.prepare()
            with self._files.writing():
                is_new = not self._registry.known(name)
                view = self._registry.create(defined, anchor_generation, materialized=materialized)
            if is_new:
                try:
                    # Another collection may have made one of that name meanwhile: their locks are not this one.
                    self._check_name(name)
                except ViewExists:
                    self.delete(name)
                    raise
            return view.public()

    def preview(self, name: str, *, materialized: bool = False, **parameters: Any) -> tuple[dict[str, Any], bool]:
        """Return the view that :meth:`create` would make, and True if it exists just so."""
        dim_in, anchor_generation = self._current_coordinates()
        defined = define_view(name, dim_in, **parameters)
        self._check_name(name)
        known = self._registry.same(defined, anchor_generation)
        later = {"materialized": materialized, "anchor_generation": anchor_generation}
        return {**asdict(defined), "collection": self._files.name, **later}, known is not None

    def delete(self, name: str) -> None:
        """Remove a view in every anchor generation."""
        with self._files.writing():
            self._registry.delete(name)

    def _current_coordinates(self) -> tuple[int, int]:
        manifest = self._reader.manifest(self._reader.resolve("current"))
        return manifest.dim, manifest.anchor_generation

    def _check_name(self, name: str) -> None:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"view name {name!r}: use [a-z0-9][a-z0-9_-]{{0,62}}")
        for other in self._store.collections():
            if other != self._files.name and name in self._store.collection(other).view_names():
                raise ViewExists(
                    f"view '{name}' exists in collection '{other}': names of views are unique; take another"
                )

    # --- their values ----------------------------------------------------------------------------------------------

    def features(self, name: str, version: str) -> RandomFourierFeatures:
        """Return the map of an rff view, from its U, which is checked against its sha256."""
        version = self._reader.resolve(version)
        self._reader.refuse_expired(version)
        entry = self._entry(name, version)
        features = self._registry.features(entry)
        if not isinstance(features, RandomFourierFeatures):
            raise ValueError(f"view '{name}' is {entry.kind}: it has no frequencies")
        return features

    def transform(self, name: str, h: Array, version: str) -> Array:
        """Return phi(h) float32 [n, dim] of a view for vectors ``h`` [n, d] of a version."""
        entry = self._entry(name, version)
        return self._registry.features(entry).transform(h)

    def lookup(self, name: str, ids: Any, version: str) -> tuple[Array, Array]:
        """Return (status uint8 [n], vectors float32 [n, dim]) of ``ids`` through a view."""
        reader = self._reader.open(version)
        entry = self._registry.get(name, reader.manifest.anchor_generation)
        return self._registry.lookup(entry, reader, self._files.versions / reader.version, ids)

    def cached(self, name: str, version: str) -> dict[str, Any] | None:
        """Return the entry of a view if :meth:`lookup` needs only what is checked and mapped here, else None."""
        reader = self._reader.opened(version)
        if reader is not None:
            with contextlib.suppress(UnknownView):
                entry = self._registry.get(name, reader.manifest.anchor_generation)
                if self._registry.is_cached(entry, reader.manifest, self._files.versions / reader.version):
                    return entry.public()
        return None

    def _entry(self, name: str, version: str) -> ViewEntry:
        return self._registry.get(name, self._reader.anchor_generation(version))
