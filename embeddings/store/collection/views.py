"""Views of a collection at one of its versions; embeddings.store.views handles their entries and files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from embeddings.rff import RandomFourierFeatures
from embeddings.rff.feature_map import FeatureMap
from embeddings.rff.registry import feature_map
from embeddings.store.collection.directory import NAME_PATTERN, CollectionDirectory
from embeddings.store.collection.reader import CollectionReader
from embeddings.store.files import CorruptStore, UnknownView, ViewExists, disk_errors
from embeddings.store.generation_maps import entry_of, map_rows, split_name
from embeddings.store.manifest import VersionManifest
from embeddings.store.version import VersionReader
from embeddings.store.view_entry import ANCHORS, ViewDefinition, ViewEntry
from embeddings.store.views import ViewRegistry, define_view
from embeddings.vectors.item_vectors import Array, ItemVectors, as_list

if TYPE_CHECKING:
    from embeddings.store.feature_store import Store


@dataclass(frozen=True)
class ServedView:
    """A view as a version serves it.

    ``name`` is that of the request, such as ``VIEW@g1``. ``first`` is the first version of the generation that is read,
    which has the map to the view's generation; None: they are equal.
    """

    entry: ViewEntry
    name: str
    first: VersionManifest | None = None

    def public(self) -> dict[str, Any]:
        """Return the view as the API shows it; one of an earlier generation has ``map``, the entry of the manifest."""
        view = {**self.entry.public(), "name": self.name}
        if self.first is None:
            return view
        back = entry_of(self.first, self.entry.anchor_generation, self.name)
        return {**view, "materialized": False, "map": {**back, "dim_in": self.first.dim}}


class CollectionViews:
    """The views of a collection at each of its versions; a part of :class:`Collection`."""

    _files: CollectionDirectory
    _reader: CollectionReader
    _registry: ViewRegistry
    _store: Store
    _anchored: WeakKeyDictionary[VersionReader, dict[tuple[str, int, str], FeatureMap]]
    """Maps of views whose matrix are vectors of the version, by the version's reader."""

    if TYPE_CHECKING:  # methods of the other parts

        def settings(self, kind: str) -> dict[str, dict[str, Any]]: ...
        def save_settings(self, kind: str, name: str, document: Mapping[str, Any] | None) -> None: ...

    # --- listing ---------------------------------------------------------------------------------------------------

    def views(self, version: str = "current") -> list[dict[str, Any]]:
        """Return the views that a version's vectors can be read through, sorted by name; none before a publication.

        Views of earlier generations, ``VIEW@gN``, are among them; ``COLLECTION@gN`` stands for those of kind identity.
        """
        if version == "current" and self._files.pointer.read().version is None:
            return []
        manifest = self._reader.manifest(self._reader.resolve(version))
        own = [view.public() for view in self._registry.all(manifest.anchor_generation)]
        earlier = [
            self._served(f"{name}@g{generation}", manifest).public()
            for generation in self._earlier_generations(manifest)
            for name in {
                self._files.name,
                *(view.name for view in self._registry.all(generation) if view.kind != "identity"),
            }
        ]
        return sorted([*own, *earlier], key=lambda view: str(view["name"]))

    def view(self, name: str, version: str = "current") -> dict[str, Any]:
        """Return a view, with the sha256 of its U.

        The entry is {name, collection, kind, dim, sigma, seed, frequencies, materialized, dim_in, anchor_generation,
        created_at, sha256 of U}. ``VIEW@gN`` is the view in generation N, ``COLLECTION@gN`` the identity view of
        generation N. If the version is of a later generation, they have the entry ``map``.

        Raises:
            UnknownView: there is no such view.
        """
        return self._served(name, self._reader.manifest(self._reader.resolve(version))).public()

    def earlier_generations(self, version: str = "current") -> list[int]:
        """Return the earlier generations that a version's vectors can be mapped to, newest first."""
        return self._earlier_generations(self._reader.manifest(self._reader.resolve(version)))

    def view_names(self) -> list[str]:
        """Return the names of all views, of any anchor generation."""
        self._files.follow()
        return self._registry.names()

    def knows_view(self, name: str) -> bool:
        """Return True if there is a view of that name in any anchor generation; this reads one folder only.

        ``VIEW@gN`` is known if VIEW is, or if VIEW is the collection's name.
        """
        base, generation = split_name(name)
        is_collection = generation is not None and base == self._files.name
        return self._files.exists() and (is_collection or self._registry.known(base))

    def has_view(self, name: str, anchor_generation: int) -> bool:
        """Return True if a view is defined for an anchor generation."""
        self._files.follow()
        return name in {view.name for view in self._registry.all(anchor_generation)}

    # --- defining --------------------------------------------------------------------------------------------------

    def create_view(
        self,
        name: str,
        *,
        dim_in: int | None = None,
        anchor_generation: int | None = None,
        materialized: bool = False,
        items: ItemVectors | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        """Create a view for the current anchor generation, or return the existing view with the same parameters.

        Before the first publication, give ``dim_in`` and ``anchor_generation``.

        Args:
            name: name of the view, unique in the store.
            dim_in: number of coordinates of the vectors.
            anchor_generation: the generation that the view is for.
            materialized: True to store the view's rows with every version written from now on.
            items: items from which an exponential view takes its anchors; None: those of the current version.
            parameters: ``kind``, ``dim``, ``sigma``, ``seed`` and ``frequencies`` of
                :func:`embeddings.store.views.define_view`.

        Raises:
            ViewExists: a view of that name has other parameters or belongs to another collection.
            ValueError: invalid parameters.
        """
        if dim_in is None or anchor_generation is None:
            dim_in, anchor_generation = self._current_coordinates()
        defined, anchors = self._define(name, dim_in, parameters, items, materialized=materialized)
        self._check_name(name)
        with disk_errors(self._files.path):
            self._files.prepare()
            if anchors is not None:
                # First, so that no reader finds the view without them.
                document = {"dim": defined.dim, "ids": anchors, "coordinates": list(range(defined.dim))}
                self.save_settings(ANCHORS, name, document)
            with self._files.writing():
                is_new = not self._registry.known(name)
                view = self._registry.create(defined, anchor_generation, materialized=materialized)
            if is_new:
                try:
                    # Another collection, which has a lock of its own, may have made a view of that name meanwhile.
                    self._check_name(name)
                except ViewExists:
                    self.delete_view(name)
                    raise
            return view.public()

    def preview_view(self, name: str, *, materialized: bool = False, **parameters: Any) -> tuple[dict[str, Any], bool]:
        """Return the view that ``create_view`` would make of these arguments, and True if it exists already.

        Nothing is created. Raises as ``create_view`` does.
        """
        dim_in, anchor_generation = self._current_coordinates()
        defined, _ = self._define(name, dim_in, parameters, None, materialized=materialized)
        self._check_name(name)
        known = self._registry.same(defined, anchor_generation)
        later = {"materialized": materialized, "anchor_generation": anchor_generation}
        return {**asdict(defined), "collection": self._files.name, **later}, known is not None

    def delete_view(self, name: str) -> None:
        """Remove a view in every anchor generation; raise UnknownView."""
        with self._files.writing():
            self._registry.delete(name)
        if name in self.settings(ANCHORS):
            self.save_settings(ANCHORS, name, None)

    def _define(
        self, name: str, dim_in: int, parameters: Mapping[str, Any], items: ItemVectors | None, *, materialized: bool
    ) -> tuple[ViewDefinition, list[Any] | None]:
        """Return a view's definition, and the ids of its anchors if it needs anchors and has none yet.

        A view has the same anchors in each generation.
        """
        defined = define_view(name, dim_in, **parameters)
        if not feature_map(defined.kind).reads_items:
            return defined, None
        if materialized:
            raise ValueError(f"view {name}: {defined.kind} vectors are computed at fetch: set materialized to false")
        chosen = self.settings(ANCHORS).get(name)
        if chosen is not None:
            if parameters.get("dim") not in (None, chosen["dim"]):
                raise ViewExists(f"view '{name}' exists with other dim: its consumers rely on it; take another name")
            return replace(defined, dim=chosen["dim"]), None
        items = self._reader.open("current").items() if items is None else items
        found = np.flatnonzero(items.renewed & items.evidence)
        if parameters.get("dim") is not None and defined.dim > len(found):
            raise ValueError(f"view {name}: {defined.dim} anchors of {len(found)} items: take a smaller dim")
        counts = np.zeros(len(items)) if items.counts is None else items.counts
        most = found[np.argsort(-counts[found], kind="stable")][: defined.dim]
        return replace(defined, dim=len(most)), as_list(items.keys[most])

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

    # --- values ----------------------------------------------------------------------------------------------------

    def frequencies(self, view: str, version: str = "current") -> Array:
        """Return U [m, d] float32 of an rff view, checked against its sha256."""
        return self.view_features(view, version).frequencies

    def view_features(self, view: str, version: str = "current") -> RandomFourierFeatures:
        """Return the feature map of an rff view, made from its U after a check of U's sha256.

        Raises:
            ValueError: a view of another kind.
            UnknownView: there is no such view.
            UnknownVersion: there is no such version, or it has expired.
            CorruptStore: U is damaged.
        """
        version = self._reader.resolve(version)
        self._reader.refuse_expired(version)
        served = self._served(view, self._reader.manifest(version))
        features = self._registry.features(served.entry)
        if not isinstance(features, RandomFourierFeatures):
            raise ValueError(f"view '{view}' is {served.entry.kind}: it has no frequencies")
        if served.first is not None:
            generation = served.entry.anchor_generation
            raise ValueError(
                f"view '{view}' maps vectors to generation {generation} first: it has no frequencies alone"
            )
        return features

    def view_transform(self, view: str, h: Array, version: str = "current") -> Array:
        """Return the features phi(h), float32 [n, dim], of a view for vectors ``h`` [n, d] of ``version``.

        Zero rows, which stand for missing items, stay zero.
        """
        version = self._reader.resolve(version)
        return self._features(self._served(view, self._reader.manifest(version)), h, version)

    def map_matrix(self, generation: int, version: str = "current") -> Array:
        """Return A [d + 1, e], float64, from vectors of ``version`` to a generation, its own or an earlier generation.

        Raises:
            UnknownView: the version has no map to that generation.
        """
        manifest = self._reader.manifest(self._reader.resolve(version))
        if generation == manifest.anchor_generation:
            return np.eye(manifest.dim + 1, manifest.dim)
        first = self._first_of(manifest)
        entry_of(first, generation, f"{self._files.name}@g{generation}")
        return self._reader.map_matrix(first, generation)

    def view_lookup(self, view: str, ids: Any, version: str = "current") -> tuple[Array, Array]:
        """Look up the features of ``ids`` in a view.

        The rows are read from the version's files if the view is materialized in it, else computed.

        Returns:
            (status uint8 [n], features float32 [n, dim]), in the order given. A missing id has a row of zeros.

        Raises:
            UnknownView: there is no such view.
            ItemIdError: ids of another type.
        """
        reader = self._reader.open(version)
        served = self._served(view, reader.manifest)
        if served.first is None and not feature_map(served.entry.kind).reads_items:
            return self._registry.lookup(served.entry, reader, self._files.versions / reader.version, ids)
        status, vectors = reader.lookup(ids)
        return status, self._features(served, vectors, reader)

    def cached_view(self, view: str, version: str = "current") -> dict[str, Any] | None:
        """Return the entry of a view if a lookup in it needs only files that this process has checked and mapped.

        Return None if the lookup needs other files, or if there is no such version or view.
        """
        reader = self._reader.opened(version)
        if reader is not None:
            with contextlib.suppress(UnknownView):
                served = self._served(view, reader.manifest)
                first, entry = served.first, served.entry
                if first is not None and not self._reader.has_map_matrix(first, entry.anchor_generation):
                    return None
                if feature_map(entry.kind).reads_items and _key(entry) not in self._anchored.get(reader, {}):
                    return None
                if self._registry.is_cached(entry, reader.manifest, self._files.versions / reader.version):
                    return served.public()
        return None

    def _features(self, served: ServedView, h: Array, version: VersionReader | str) -> Array:
        if not feature_map(served.entry.kind).reads_items:
            return self._registry.features(served.entry).transform(self._mapped(served, h))
        reader = self._reader.open(version) if isinstance(version, str) else version
        known = self._anchored.setdefault(reader, {})
        if (key := _key(served.entry)) not in known:
            matrix = self._mapped(served, self._vectors_of_anchors(served.entry, reader))
            known[key] = feature_map(served.entry.kind).load(served.entry.parameters, matrix)
        return known[key].transform(self._mapped(served, h))

    def _mapped(self, served: ServedView, h: Array) -> Array:
        """Return vectors of a version in the coordinates of the view's generation."""
        if served.first is None:
            return h
        return map_rows(h, self._reader.map_matrix(served.first, served.entry.anchor_generation))

    def _vectors_of_anchors(self, entry: ViewEntry, reader: VersionReader) -> Array:
        """Return a version's vectors of a view's anchors, [dim, d]; zero for anchors that it does not have."""
        anchors = self.settings(ANCHORS).get(entry.name)
        if anchors is None:
            raise CorruptStore(
                f"view '{entry.name}' of '{self._files.name}' has lost its anchors: restore settings/{ANCHORS}"
            )
        vectors = np.zeros((entry.dim, reader.dim), dtype=np.float32)
        if anchors["ids"]:
            is_text = reader.manifest.id_type == "string"
            ids = [str(identifier) for identifier in anchors["ids"]] if is_text else anchors["ids"]
            vectors[anchors["coordinates"]] = reader.lookup(ids)[1]
        return vectors

    def _served(self, name: str, manifest: VersionManifest) -> ServedView:
        """Return a view as a version serves it; raise UnknownView."""
        base, generation = split_name(name)
        own = manifest.anchor_generation
        if generation is None or (generation == own and self._registry.known(base)):
            return ServedView(self._registry.get(base, own), name)
        first, dim = None, manifest.dim
        if generation != own:
            first = self._first_of(manifest)
            dim = entry_of(first, generation, name)["dim"]
        if self._registry.known(base) or base != self._files.name:
            return ServedView(self._registry.get(base, generation), name, first)
        entry = ViewEntry(
            **asdict(define_view(base, dim, kind="identity")), collection=self._files.name,
            anchor_generation=generation, materialized=False, created_at=manifest.created_at, sha256=None,
        )  # fmt: skip
        return ServedView(entry, name, first)

    def _earlier_generations(self, manifest: VersionManifest) -> list[int]:
        try:
            maps = self._first_of(manifest).maps
        except CorruptStore:
            return []
        return [entry["generation"] for entry in maps if not entry["reasons"]]

    def _first_of(self, manifest: VersionManifest) -> VersionManifest:
        is_first = manifest.anchor_version == manifest.version
        return manifest if is_first else self._reader.manifest(manifest.anchor_version)


def _key(entry: ViewEntry) -> tuple[str, int, str]:
    return entry.name, entry.anchor_generation, entry.created_at
