"""Searches of versions by an index that another process builds: for nearest neighbours, and for users' best items.

A large version is searched exactly until its index is ready, or for good if it would miss too many items. The first
search starts the build: a low-priority process writes it to ``$EVENKEEL_HOME/neighbors/TENANT/COLLECTION/``, a single
process on this host however many workers ask, and every worker maps the file. Below that folder, ``scores/`` has the
indexes for users. Indexes of versions that are no longer searched are removed. Indexes that were built before ids were
erased from their collection, by any process, are removed too: the file's name contains the number of erasures.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from embeddings.store import Collection, VersionReader
from embeddings.store.item_scores import EXACT_ITEMS, ScoreIndex
from embeddings.store.nearest_neighbors import EXACT_ROWS, NeighborSearch
from embeddings.store.users import Recommender
from embeddings.vectors.item_vectors import MISSING, as_list, find_rows, keys_of
from service.core import tenants
from service.core.errors import Problem
from service.core.tenants import DEFAULT_TENANT
from service.features.store_access import ids_as, rereading

log = logging.getLogger("evenkeel")

NUM_SEARCHES = 4
"""Number of versions whose search stays in memory."""
KEPT_INDEXES = 3
"""Most indexes of a collection on disk."""
RETRY_SECONDS = 600.0
SCORES = "scores"
"""Folder of a collection's indexes for users, and the builder's option for them."""
SCORES_SUFFIX = ".json"
"""Suffix of the file that tells of an index for users."""

Search = TypeVar("Search", NeighborSearch, ScoreIndex)


class Indexes:
    """Searches, one per version and kind. Thread-safe."""

    def __init__(self, store_url: str, directory: Path, exact_rows: int = EXACT_ROWS, exact_items: int = EXACT_ITEMS):
        self._store_url = store_url
        self._directory = directory
        self._exact_rows, self._exact_items = exact_rows, exact_items
        self._searches: OrderedDict[Path, NeighborSearch | ScoreIndex] = OrderedDict()
        self._builders: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}
        self._lock = threading.Lock()

    def find(
        self, collection: Collection, query: Any, k: int, version: str = "current", tenant: str = DEFAULT_TENANT
    ) -> dict[str, Any]:
        """Return the answer of the route: ``version``, ``exact`` and the ``items``, best first; query: id or vector.

        Raises:
            Problem: 404 for an id that the version does not contain or has no vector for.
        """

        def answer() -> dict[str, Any]:
            erasures = collection.num_erasures()
            reader = collection.open(version)
            wanted = ids_as(reader.manifest.id_type, [query])[0] if isinstance(query, int | str) else query
            nearest = self.search(reader, wanted, k, tenant, erasures=erasures)
            if nearest is None:
                what = f"Version {reader.version} has no vector of item {query!r}"
                raise Problem(404, "item-not-found", f"{what}: it has no training row, or was erased. Give another id.")
            items = [{"id": identifier, "cosine": cosine} for identifier, cosine in nearest[0]]
            return {"version": reader.version, "exact": nearest[1], "items": items}

        return rereading(collection, answer)

    def search(
        self, reader: VersionReader, query: Any, k: int, tenant: str = DEFAULT_TENANT, *, erasures: int
    ) -> tuple[list[tuple[Any, float]], bool] | None:
        """Return ([(id, cosine)], is_exact) for the ``k`` nearest items, best first.

        ``is_exact`` is False if an index chose the candidates. ``query`` is an id, which is left out of the result, or
        a vector. ``erasures``: number of erasures in the collection, which must be read before ``reader`` is opened.

        Returns:
            The pair above, or None for an id that the version does not contain or has no vector for.
        """
        own_row = -1
        if isinstance(query, (int, str)):
            own_row = int(find_rows(reader.keys, keys_of([query], query=True))[0])
            if own_row < 0 or reader.statuses[own_row] == MISSING or not reader.vectors[own_row].any():
                return None
            query = reader.vectors[own_row]
        folder = self._directory / tenant / reader.manifest.collection

        def open_search(path: Path | None) -> NeighborSearch:
            return NeighborSearch(reader.vectors, reader.statuses, path)

        search = self._search_of(folder, reader, len(reader) > self._exact_rows, open_search, tenant, erasures)
        rows, cosines = search.search(query, k, own_row)
        return list(zip(as_list(reader.keys[rows]), cosines.tolist(), strict=True)), search.exact

    def of_scores(self, recommender: Recommender, tenant: str = DEFAULT_TENANT, *, erasures: int) -> ScoreIndex | None:
        """Return the index of a large version for users, exact until it is built; None for a smaller version.

        ``erasures``: number of erasures in the collection, which must be read before ``recommender`` is opened.
        """
        reader, items = recommender.reader, recommender.items
        if len(items) <= self._exact_items:
            return None
        folder = self._directory / tenant / reader.manifest.collection / SCORES
        return self._search_of(folder, reader, True, lambda path: ScoreIndex(items, path), tenant, erasures)

    def forget(self, collection: str, tenant: str = DEFAULT_TENANT) -> None:
        """Discard everything cached for a collection, including indexes on disk, because ids were erased from it."""
        directory = self._directory / tenant / collection
        with self._lock:
            self._drop(lambda path: path.is_relative_to(directory))
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Stop the builders and discard the searches."""
        with self._lock:
            self._drop(lambda path: True)

    def _search_of(
        self,
        folder: Path,
        reader: VersionReader,
        is_large: bool,
        open_search: Callable[[Path | None], Search],
        tenant: str,
        erasures: int,
    ) -> Search:
        """Return the search of a version, and start building the index in ``folder`` that a large version lacks."""
        suffix = SCORES_SUFFIX if folder.name == SCORES else ".usearch"
        path = folder / f"{reader.version}-{reader.manifest.identity}-{erasures}{suffix}"
        with self._lock:
            search: Any = self._searches.get(path)
            if search is None or (is_large and not search.is_built and path.exists()):
                self._drop_earlier(path, reader.version, erasures)
                search = self._searches[path] = _open(open_search, path if is_large else None)
                while len(self._searches) > NUM_SEARCHES:
                    self._searches.popitem(last=False)
            self._searches.move_to_end(path)
            # A builder that ended without a file found another at work.
            ended = [index for index, (builder, _) in self._builders.items() if builder.poll() == 0]
            for done in filter(Path.exists, ended):
                del self._builders[done]
            if is_large and not search.is_built:
                self._ask_for(path, tenant, reader)
        found: Search = search
        return found

    def _drop_earlier(self, path: Path, version: str, erasures: int) -> None:
        """Discard outdated data of the collection.

        Outdated data were made before the latest erasure, or for rows that the store had under this version's name
        before it was restored or created anew.
        """

        def is_earlier(other: Path) -> bool:
            outdated = not other.stem.endswith(f"-{erasures}") or other.name.startswith(f"{version}-")
            return other.parent == path.parent and other.stem != path.stem and outdated

        self._drop(is_earlier)
        for suffix in {path.suffix, ".usearch"}:
            for other in filter(is_earlier, path.parent.glob(f"v*{suffix}")):
                other.unlink(missing_ok=True)

    def _drop(self, is_meant: Callable[[Path], bool]) -> None:
        """Stop the builders and discard the searches of all indexes whose path ``is_meant`` accepts."""
        for path in filter(is_meant, list(self._builders)):
            builder, _ = self._builders.pop(path)
            builder.terminate()
            builder.wait()
        for path in filter(is_meant, list(self._searches)):
            del self._searches[path]

    def _ask_for(self, path: Path, tenant: str, reader: VersionReader) -> None:
        """Start a process that builds the index, unless such a process is running or failed a short while ago."""
        building = self._builders.get(path)
        if building is not None:
            builder, started = building
            if builder.poll() is None or time.monotonic() - started < RETRY_SECONDS:
                return
        _remove_old(path)
        manifest = reader.manifest
        command = [sys.executable, "-m", "embeddings.store.build_index", manifest.collection, reader.version]
        command += [manifest.identity, str(path), "--threads", str(max((os.cpu_count() or 1) // 2, 1))]
        if path.parent.name == SCORES:
            command.append(f"--{SCORES}")
        builder = subprocess.Popen(
            ["nice", "-n", "10", *command],
            env={**os.environ, "EVENKEEL_STORE_URL": tenants.url_of(self._store_url, tenant)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._builders[path] = builder, time.monotonic()


def _open(open_search: Callable[[Path | None], Search], path: Path | None) -> Search:
    if path is not None and path.exists():
        try:
            return open_search(path)
        except ValueError as error:
            log.warning("%s: the index is built again", error)
            _unlink(path)
    return open_search(None)


def _unlink(path: Path) -> None:
    """Remove the file of an index, and the index beside it."""
    path.unlink(missing_ok=True)
    path.with_suffix(".usearch").unlink(missing_ok=True)


def _remove_old(path: Path) -> None:
    """Remove the collection's oldest indexes except ``path``.

    A process that has mapped a removed file can still read it.
    """
    try:
        others = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda other: other.stat().st_mtime)
        for other in others[: max(len(others) - KEPT_INDEXES + 1, 0)]:
            _unlink(other)
    except OSError as error:
        log.warning("old indexes in %s could not be removed: %s", path.parent, error)
