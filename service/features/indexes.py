"""Nearest-neighbour search for the route: one search per version, with indexes that other processes build.

A large version is searched exactly until its index is ready. The first search starts the build: a low-priority process
writes it to ``$EVENKEEL_HOME/neighbors/TENANT/COLLECTION/``, one on this host however many workers ask, and every
worker maps the file. Indexes of versions that are no longer searched are removed. Indexes that were built before ids
were erased from their collection, by any process, are removed too: the file's name contains the number of erasures.
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
from typing import Any

from embeddings.store import VersionReader
from embeddings.store.nearest_neighbors import EXACT_ROWS, NeighborSearch
from embeddings.vectors.item_vectors import MISSING, as_list, find_rows, keys_of
from service.core import tenants
from service.core.tenants import DEFAULT_TENANT

log = logging.getLogger("evenkeel")

NUM_SEARCHES = 4
"""Number of versions whose search stays in memory."""
KEPT_INDEXES = 3
"""Most indexes of a collection on disk."""
RETRY_SECONDS = 600.0


class Indexes:
    """Searches for nearest neighbours, one per version. Thread-safe."""

    def __init__(self, store_url: str, directory: Path, exact_rows: int = EXACT_ROWS):
        self._store_url = store_url
        self._directory = directory
        self._exact_rows = exact_rows
        self._searches: OrderedDict[Path, NeighborSearch] = OrderedDict()
        self._builders: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}
        self._lock = threading.Lock()

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
        search = self._search_of(reader, tenant, erasures)
        rows, cosines = search.search(query, k, own_row)
        return list(zip(as_list(reader.keys[rows]), cosines.tolist(), strict=True)), search.exact

    def forget(self, collection: str, tenant: str = DEFAULT_TENANT) -> None:
        """Discard everything cached for a collection, including indexes on disk, because ids were erased from it."""
        directory = self._directory / tenant / collection
        with self._lock:
            self._drop(lambda path: path.parent == directory)
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Stop the builders and discard the searches."""
        with self._lock:
            self._drop(lambda path: True)

    def _search_of(self, reader: VersionReader, tenant: str, erasures: int) -> NeighborSearch:
        collection = reader.manifest.collection
        path = self._directory / tenant / collection / f"{reader.version}-{reader.manifest.identity}-{erasures}.usearch"
        large = len(reader) > self._exact_rows
        with self._lock:
            search = self._searches.get(path)
            if search is None or (search.exact and large and path.exists()):
                self._drop_earlier(path, reader.version, erasures)
                search = self._searches[path] = self._open(reader, path if large else None)
                while len(self._searches) > NUM_SEARCHES:
                    self._searches.popitem(last=False)
            self._searches.move_to_end(path)
            for done in [index for index, (builder, _) in self._builders.items() if builder.poll() == 0]:
                del self._builders[done]
            if large and search.exact:
                self._ask_for(path, tenant, collection, reader.version)
        return search

    def _drop_earlier(self, path: Path, version: str, erasures: int) -> None:
        """Discard outdated data of the collection.

        That is all data made before the latest erasure, and data for rows that the store had under this version's name
        before it was restored or created anew.
        """

        def is_earlier(other: Path) -> bool:
            outdated = not other.name.endswith(f"-{erasures}.usearch") or other.name.startswith(f"{version}-")
            return other.parent == path.parent and other != path and outdated

        self._drop(is_earlier)
        for other in filter(is_earlier, path.parent.glob("v*.usearch")):
            other.unlink(missing_ok=True)

    def _drop(self, is_meant: Callable[[Path], bool]) -> None:
        """Stop the builders and discard the searches of all indexes whose path ``is_meant`` accepts."""
        for path in filter(is_meant, list(self._builders)):
            builder, _ = self._builders.pop(path)
            builder.terminate()
            builder.wait()
        for path in filter(is_meant, list(self._searches)):
            del self._searches[path]

    def _open(self, reader: VersionReader, path: Path | None) -> NeighborSearch:
        if path is not None and path.exists():
            try:
                return NeighborSearch(reader.vectors, reader.statuses, path)
            except ValueError as error:
                log.warning("%s: the index is built again", error)
                path.unlink(missing_ok=True)
        return NeighborSearch(reader.vectors, reader.statuses)

    def _ask_for(self, path: Path, tenant: str, collection: str, version: str) -> None:
        """Start a process that builds the index, unless one is running or failed a short while ago."""
        building = self._builders.get(path)
        if building is not None:
            builder, started = building
            if builder.poll() is None or time.monotonic() - started < RETRY_SECONDS:
                return
        _remove_old(path)
        command = [sys.executable, "-m", "embeddings.store.build_index", collection, version, str(path)]
        command += ["--threads", str(max((os.cpu_count() or 1) // 2, 1))]
        builder = subprocess.Popen(
            ["nice", "-n", "10", *command],
            env={**os.environ, "EVENKEEL_STORE_URL": tenants.url_of(self._store_url, tenant)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._builders[path] = builder, time.monotonic()


def _remove_old(path: Path) -> None:
    """Remove the collection's oldest indexes except ``path``.

    A process that has mapped a removed file can still read it.
    """
    try:
        others = sorted(path.parent.glob("*.usearch"), key=lambda other: other.stat().st_mtime)
        for other in others[: max(len(others) - KEPT_INDEXES + 1, 0)]:
            other.unlink(missing_ok=True)
    except OSError as error:
        log.warning("old indexes in %s could not be removed: %s", path.parent, error)
