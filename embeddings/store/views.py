"""Feature views of a collection: a name, the kind and parameters of a feature map, and the map's published matrix U.

A view belongs to an anchor generation, because its consumers were trained in that generation's coordinates. When a
collection starts a new generation, the view gets a new entry with its own U, at the first publication in the
generation or when the view is created in it. ``views/NAME/g0001.json`` is the entry of generation 1,
``views/NAME/g0001.arrow`` its U.

The features of a view are computed from a version's vectors when they are fetched; only U is stored. For a
*materialized* view they are computed when a version is written, and stored next to its vectors as
``view-NAME.arrow``: float32 [rows, dim] in the order of the items. For versions written before the view was
materialized they are still computed.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embeddings.durable_files import fsync_path, make_directory
from embeddings.rff import DEFAULT_SIGMA, FREQUENCIES, digest
from embeddings.rff.feature_map import FeatureMap, MapParameters
from embeddings.rff.registry import FEATURE_MAPS, feature_map
from embeddings.store.arrow_stream import write_streamed
from embeddings.store.files import (
    CorruptStore,
    FileEntry,
    UnknownView,
    ViewExists,
    file_mark,
    read_document,
    replace_document,
    sweep,
)
from embeddings.store.manifest import VersionManifest
from embeddings.store.version import VersionReader, matrix_of, read_arrow, verify_file, write_arrow
from embeddings.store.view_entry import ViewDefinition, ViewEntry
from embeddings.vectors.item_vectors import MISSING, Array, ItemVectors, keys_of
from embeddings.vectors.lazy_rows import Rows, Vectors

PARAMETERS = ("kind", *(one.name for one in fields(MapParameters) if one.name != "dim_in"))
ROTATION_FILE = "rotation.arrow"
MAPPED_VIEWS = 16

logger = logging.getLogger("evenkeel.store")

ROWS_COLUMN = "vector"


def default_view(collection: str) -> str:
    """Return the name of the view that every published collection has, cut to the maximal length of a name."""
    return f"{collection}_rff"[:63]


def raw_view(collection: str) -> str:
    """Return the name of the identity view that every published collection has, if no other view has this name."""
    return f"{collection[:59]}_raw"


def define_view(
    name: str,
    dim_in: int,
    *,
    kind: str = "rff",
    dim: int | None = None,
    sigma: float = DEFAULT_SIGMA,
    seed: int = 0,
    frequencies: str = "orthogonal",
) -> ViewDefinition:
    """Return a view's parameters with the defaults of its kind filled in.

    Raises:
        ValueError: invalid parameters.
    """
    if kind not in FEATURE_MAPS:
        raise ValueError(f"view {name}: kind '{kind}' is not one of {', '.join(FEATURE_MAPS)}")
    if frequencies not in FREQUENCIES:
        raise ValueError(f"view {name}: frequencies '{frequencies}' is not one of {', '.join(FREQUENCIES)}")
    try:
        defined = feature_map(kind).define(dim_in, dim=dim, sigma=sigma, seed=seed, frequencies=frequencies)
    except ValueError as error:
        raise ValueError(f"view {name}: {error}") from None
    return ViewDefinition(
        name=name, kind=kind, dim=defined.dim, sigma=defined.sigma, seed=defined.seed,
        frequencies=defined.frequencies, dim_in=dim_in,
    )  # fmt: skip


class ViewRegistry:
    """The views of one collection; the caller of a method that changes them holds the collection's writer lock."""

    def __init__(self, directory: Path, collection: str):
        self._directory = directory
        self._collection = collection
        self._features: dict[tuple[str, MapParameters, str | None], tuple[FeatureMap, Array | None]] = {}
        self._entries: dict[Path, tuple[tuple[int, ...], ViewEntry]] = {}
        self._stored: OrderedDict[Path, Array] = OrderedDict()
        self._damaged: dict[Path, tuple[int, ...] | None] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        return sorted(
            path.name
            for path in self._directory.iterdir()
            if not path.name.startswith(".") and any(path.glob("g*.json"))
        )

    def known(self, name: str) -> bool:
        """Return True if ``name`` is among ``names``."""
        return any((self._directory / name).glob("g*.json"))

    def get(self, name: str, generation: int) -> ViewEntry:
        """Return the view's entry for an anchor generation; raise UnknownView if there is none."""
        path = self._entry_path(name, generation)
        mark = file_mark(path)
        if mark is not None:
            # Entries are replaced, never rewritten, so a stat shows if the cached one is current.
            with self._lock:
                known = self._entries.get(path)
            if known is not None and known[0] == mark:
                return known[1]
            entry = _read_entry(path)
            if entry is not None:
                with self._lock:
                    self._entries[path] = (mark, entry)
                return entry
        if name in self.names():
            raise UnknownView(
                f"view '{name}' of collection '{self._collection}' is not defined for anchor generation {generation}, "
                "which another model or dim began: create it again, and retrain its consumers on it"
            )
        raise UnknownView(
            f"collection '{self._collection}' has no view '{name}' (there are: {', '.join(self.names()) or 'none'})"
        )

    def all(self, generation: int) -> list[ViewEntry]:
        """Return the entries of all views that are defined for the generation, sorted by name."""
        entries = (_read_entry(self._entry_path(name, generation)) for name in self.names())
        return [entry for entry in entries if entry is not None]

    def create(self, defined: ViewDefinition, generation: int, *, materialized: bool = False) -> ViewEntry:
        """Add the entry of a view for a generation and return it; if an equal entry exists, return that.

        The existing entry's ``materialized`` is set to the argument, which changes no value that is served.

        Raises:
            ViewExists: an entry of that name has other parameters.
        """
        path = self._entry_path(defined.name, generation)
        existing = self.same(defined, generation)
        if existing is not None:
            if existing.materialized != materialized:
                existing = replace(existing, materialized=materialized)
                replace_document(path, existing.to_json())
            return existing
        make_directory(path.parent)
        sweep(path.parent)
        matrix, file = feature_map(defined.kind).draw(defined.parameters), None
        if matrix is not None:
            material = path.with_suffix(".arrow")
            material.unlink(missing_ok=True)
            file = write_arrow(material, matrix_batch(matrix))
        entry = ViewEntry(
            **asdict(defined),
            collection=self._collection,
            anchor_generation=generation,
            materialized=materialized,
            created_at=utc_now(),
            sha256=None if matrix is None else digest(matrix),
            file=file,
        )
        replace_document(path, entry.to_json())
        return entry

    def same(self, defined: ViewDefinition, generation: int) -> ViewEntry | None:
        """Return the existing entry with this name and definition, or None if the name is new in the generation.

        Raises:
            ViewExists: the entry of that name has another definition.
        """
        name = defined.name
        existing = _read_entry(self._entry_path(name, generation))
        if existing is None:
            return None
        differing = [key for key in PARAMETERS if getattr(existing, key) != getattr(defined, key)]
        if differing or existing.dim_in != defined.dim_in:
            raise ViewExists(
                f"view '{name}' exists with other {', '.join(differing) or 'vectors'}: its consumers rely on it; "
                "take another name, or delete it first"
            )
        return existing

    def delete(self, name: str) -> None:
        """Remove a view in every generation; raise UnknownView if there is no such view."""
        if name not in self.names():
            raise UnknownView(f"collection '{self._collection}' has no view '{name}'")
        grave = self._directory / f".gone-{uuid.uuid4().hex}"
        (self._directory / name).rename(grave)
        fsync_path(self._directory)
        shutil.rmtree(grave, ignore_errors=True)
        with self._lock:
            self._features.clear()

    def clean(self) -> None:
        """Remove the temporary files and folders of killed writers."""
        if self._directory.is_dir():
            for grave in self._directory.glob(".gone-*"):
                shutil.rmtree(grave, ignore_errors=True)
            for path in self._directory.iterdir():
                sweep(path)

    def features(self, entry: ViewEntry) -> FeatureMap:
        """Return the feature map of an entry, made from its published U after a check of U's sha256.

        Raises:
            CorruptStore: U is damaged.
            ValueError: U's sha256 differs from the published sha256, or no installed package has the view's kind.
        """
        return self._features_and_matrix(entry)[0]

    def _features_and_matrix(self, entry: ViewEntry) -> tuple[FeatureMap, Array | None]:
        key = entry.map_key
        with self._lock:
            if key not in self._features:
                matrix = self._published_matrix(entry)
                features = feature_map(entry.kind).load(entry.parameters, matrix)
                self._features[key] = features, matrix
            return self._features[key]

    def _published_matrix(self, entry: ViewEntry) -> Array | None:
        if entry.file is None:
            return None
        directory = self._entry_path(entry.name, entry.anchor_generation).parent
        matrix = read_matrix(verify_file(directory, entry.file))
        if digest(matrix) != entry.sha256:
            raise ValueError(
                f"the frequencies have sha256 {digest(matrix)}, published was {entry.sha256}: fetch them again"
            )
        return matrix

    def write_into(self, directory: Path, views: Sequence[ViewEntry], items: ItemVectors) -> list[FileEntry]:
        """Write a copy of each view's U, and the rows of materialized views, into a version's ``directory``.

        The rows are features of ``items``. Return the manifest's entries of the files.
        """
        files = []
        for view in views:
            if feature_map(view.kind).reads_items:
                continue
            features, matrix = self._features_and_matrix(view)
            if matrix is not None:
                files.append(write_arrow(directory / f"frequencies-{view.name}.arrow", matrix_batch(matrix)))
            if view.materialized and features.computes:
                rows = Featurized(features, view.dim, items.vectors)
                files.append(write_streamed(directory / _rows_file(view.name), {}, ROWS_COLUMN, rows))
        return files

    def lookup(self, entry: ViewEntry, reader: VersionReader, directory: Path, ids: Any) -> tuple[Array, Array]:
        """Return (status uint8 [n], features float32 [n, dim]) of ``ids`` in a version with files in ``directory``.

        Features are read from the version's file if the view is materialized in it and the file is sound, else
        computed. A missing id has a row of zeros.

        Raises:
            ItemIdError: ids of another type.
        """
        stored = self._stored_rows(entry, reader.manifest, directory)
        if stored is None:
            status, vectors = reader.lookup(ids)
            return status, self.features(entry).transform(vectors)
        rows = reader.find_rows(keys_of(ids, query=True))
        absent = rows < 0
        rows[absent] = 0
        status = reader.statuses[rows]
        phi = stored[rows]
        status[absent] = MISSING
        phi[absent] = 0.0
        return status, phi

    def forget_rows(self) -> None:
        """Drop all memory-mapped rows of views, since some may have been erased."""
        with self._lock:
            self._stored.clear()

    def is_cached(self, entry: ViewEntry, manifest: VersionManifest, directory: Path) -> bool:
        """Return True if all that :meth:`lookup` needs of this view is in memory or memory-mapped already."""
        file = _file_of_rows(entry, manifest)
        with self._lock:
            if file is not None:
                return directory / file.name in self._stored
            return entry.file is None or entry.map_key in self._features

    def _stored_rows(self, entry: ViewEntry, manifest: VersionManifest, directory: Path) -> Array | None:
        """Return a view's rows as stored in a version, memory-mapped; None if absent, damaged or of another U."""
        file = _file_of_rows(entry, manifest)
        if file is None:
            return None
        path = directory / file.name
        with self._lock:
            rows = self._stored.get(path)
            if rows is not None:
                self._stored.move_to_end(path)
                return rows
        mark = file_mark(path)
        with self._lock:
            # The damaged file is still there; a file in its place may have been restored.
            if path in self._damaged and self._damaged[path] == mark:
                return None
        try:
            rows = read_rows(verify_file(directory, file), (manifest.rows, entry.dim))
        except CorruptStore as error:
            # The version's vectors, from which they were computed, give the same rows.
            logger.error("view '%s': %s: its rows are computed from the version's vectors meanwhile", entry.name, error)
            with self._lock:
                self._damaged[path] = mark
            return None
        with self._lock:
            self._damaged.pop(path, None)
            self._stored[path] = rows
            while len(self._stored) > MAPPED_VIEWS:
                self._stored.popitem(last=False)
        return rows

    def _entry_path(self, name: str, generation: int) -> Path:
        return self._directory / name / f"g{generation:04d}.json"


def _read_entry(path: Path) -> ViewEntry | None:
    document = read_document(path)
    return None if document is None else ViewEntry.from_json(document, path)


def _rows_file(name: str) -> str:
    return f"view-{name}.arrow"


def _file_of_rows(entry: ViewEntry, manifest: VersionManifest) -> FileEntry | None:
    """Return the manifest's entry of the file with the view's rows; None if another map of that name made them."""
    written = next((view for view in manifest.views if view.name == entry.name), None)
    if written is None or not written.materialized or written.map_key != entry.map_key:
        return None
    return manifest.file(_rows_file(entry.name))


class Featurized(Rows):
    """The features [n, dim] of ``vectors`` [n, d], computed when rows are read."""

    def __init__(self, features: FeatureMap, dim: int, vectors: Vectors):
        super().__init__(len(vectors), dim)
        self._features = features
        self._vectors = vectors

    def read(self, rows: slice | Array) -> Array:
        return self._features.transform(self._vectors[rows])


def read_rows(path: Path, shape: tuple[int, int]) -> Array:
    """Return the rows of a materialized view, memory-mapped.

    Raises:
        CorruptStore: the file's rows have another shape.
    """
    column = read_arrow(path).column(ROWS_COLUMN)
    stored = (len(column), column.type.list_size)
    if stored != shape:
        raise CorruptStore(f"{path}: holds rows of shape {stored}, the manifest says {shape}: publish a version again")
    return matrix_of(column)


def matrix_batch(matrix: Array) -> pa.RecordBatch:
    """Return a matrix (U [m, d], or a rotation) as one Arrow record batch, with its sha256 in the metadata.

    The batch's only column, ``u``, holds a fixed-size list for each row of the matrix.
    """
    flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    rows = pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])
    batch = pa.record_batch({"u": rows})
    return batch.replace_schema_metadata({"sha256": digest(matrix)})


def read_matrix(path: Path) -> Array:
    """Return the matrix in a file whose record batch :func:`matrix_batch` made."""
    return np.array(matrix_of(read_arrow(path).column("u")))


def utc_now() -> str:
    """Return the current UTC time as RFC 3339 text with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
