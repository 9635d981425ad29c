"""A remote store, used through local mirrors of its collections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from embeddings.store.backends.mirror import Mirror
from embeddings.store.backends.remote import Remote
from embeddings.store.collection.directory import NAME_PATTERN, CollectionDirectory
from embeddings.store.feature_store import Store
from embeddings.store.files import StoreUnavailable


class RemoteStore(Store):
    """A remote store, used through local mirrors of its collections in the folder ``cache``."""

    is_remote = True

    def __init__(
        self,
        url: str,
        cache: Path,
        names: Callable[[], Iterable[str]],
        connect: Callable[[str], Remote],
        follow_seconds: float,
    ):
        super().__init__(cache)
        self.url = url
        self._list = names
        self._connect = connect
        self._follow_seconds = follow_seconds

    def reach(self) -> None:
        self._list()

    def available_offline(self) -> bool:
        here = (self.collection(name) for name in super()._names() if NAME_PATTERN.fullmatch(name))
        within = (self.namespace(name) for name in self.namespaces())
        return any(collection.available_offline() for collection in here) or any(
            store.available_offline() for store in within
        )

    def _names(self) -> Iterable[str]:
        try:
            return self._list()
        except StoreUnavailable:
            here = list(super()._names())
            if not here:
                raise  # nothing was ever seen of it: not a store without collections
            return here

    def _collection_files(self, name: str) -> CollectionDirectory:
        path = super()._collection_files(name).path
        return Mirror(path, name, self._connect(name), self._follow_seconds, self.url)
