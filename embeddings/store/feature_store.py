"""The embedded feature store: immutable versions of item vectors, one atomic switch, readers that never wait.

    STORE/collections/NAME/CURRENT               served version and history of switches: replaced in one step
                           versions/v000001/     manifest.json, items.arrow, frequencies of views, maps; never changed
                           states/v000001.json   held (with reasons) or expired
                           views/VIEW/g0001.json the view in anchor generation 1, and its frequencies
                           LOCK                  one writer at a time
          namespaces/NAME/                       a store within the store

A version's state follows from these files: *published* if CURRENT names it, *superseded* if CURRENT named it before,
*held* or *expired* if its state file says so, else *candidate*. A publication replaces CURRENT under the writer lock,
if CURRENT still names the version that the publisher started from; else the publisher gets StaleParent. Readers take
no lock, and need nothing but these files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from embeddings.store.collection.collection import Collection
from embeddings.store.collection.directory import NAME_PATTERN, CollectionDirectory
from embeddings.store.files import UnknownView
from embeddings.store.url import namespaced


class Store:
    """Collections of item vectors under one directory; thread-safe, and any number of processes may open it."""

    is_remote = False
    """True if the store needs a server, which may be unreachable."""

    def __init__(self, root: Path):
        self.root = root
        self.url = str(root)
        self.opened_from = self.url  # may hold a password: not to be shown
        self.open_url: Callable[[str], Store] = lambda url: Store(Path(url))
        """Function that opens the namespaces of this store by URL."""
        self._namespaces: dict[str, Store] = {}
        self._collections: dict[str, Collection] = {}
        self._view_collections: dict[str, Collection] = {}
        self._lock = threading.Lock()

    def collections(self) -> list[str]:
        """Return the names of all collections that have a version, of whatever state."""
        names = sorted(name for name in self._names() if NAME_PATTERN.fullmatch(name))
        return [name for name in names if self.collection(name).exists()]

    def collection(self, name: str) -> Collection:
        """Return the collection of that name; it is created when its first version is written.

        Raises:
            ValueError: a name that is not ``[a-z0-9][a-z0-9_-]{0,62}``.
        """
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"collection name {name!r}: use [a-z0-9][a-z0-9_-]{{0,62}}")
        with self._lock:
            if name not in self._collections:
                self._collections[name] = Collection(self._collection_files(name), self)
            return self._collections[name]

    def view_collection(self, view: str) -> Collection:
        """Return the collection of view VIEW or VIEW@gN (in generation N); names of views are unique in a store.

        Raises:
            UnknownView: no collection has the view.
        """
        known = self.seen_view_collection(view)
        if known is not None:
            return known
        for collection in map(self.collection, self.collections()):
            if collection.knows_view(view):
                self._view_collections[view] = collection
                return collection
        raise UnknownView(f"no collection has a view '{view}'")

    def seen_view_collection(self, view: str) -> Collection | None:
        """Return the collection that has the view, without a search; None if no earlier search has found it."""
        known = self._view_collections.get(view)
        return known if known is not None and known.knows_view(view) else None

    def namespace(self, name: str) -> Store:
        """Return the namespace ``name``, a separate store within this one; it need not exist yet.

        Other namespaces may use the same names for their own collections and views.

        Raises:
            ValueError: a name that is not ``[a-z0-9][a-z0-9_-]{0,62}``.
        """
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"namespace {name!r}: use [a-z0-9][a-z0-9_-]{{0,62}}")
        with self._lock:
            if name not in self._namespaces:
                self._namespaces[name] = self.open_url(namespaced(self.opened_from, name))
            return self._namespaces[name]

    def namespaces(self) -> list[str]:
        """Return the names of the namespaces that this process has used."""
        with self._lock:
            return sorted(self._namespaces)

    def finish_erasures(self) -> None:
        """Finish interrupted erasures of every collection."""
        for name in self.collections():
            self.collection(name).finish_erasure()

    def reach(self) -> None:
        """Send a small request to the server, if any; raise StoreUnavailable, StoreError if it fails."""

    def available_offline(self) -> bool:
        """Return True if vectors of any collection can be fetched while the server cannot be reached."""
        return True

    def damaged(self) -> dict[str, dict[str, str]]:
        """Return the damage that this process found: collection, version and reason.

        A collection within a namespace is ``NAMESPACE/NAME``.
        """
        with self._lock:
            opened = list(self._collections.values())
            within = list(self._namespaces.items())
        damaged = {collection.name: collection.damaged() for collection in opened}
        for namespace, store in within:
            damaged |= {f"{namespace}/{name}": versions for name, versions in store.damaged().items()}
        return {name: versions for name, versions in damaged.items() if versions}

    def _names(self) -> Iterable[str]:
        try:
            return [path.name for path in (self.root / "collections").iterdir()]
        except FileNotFoundError:
            return []

    def _collection_files(self, name: str) -> CollectionDirectory:
        return CollectionDirectory(self.root / "collections" / name, name)
