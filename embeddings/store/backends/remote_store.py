"""A remote store, used through local mirrors of its collections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from embeddings.store.backends.mirror import Mirror
from embeddings.store.backends.remote import Remote
from embeddings.store.collection.directory import NAME_PATTERN, CollectionDirectory
from embeddings.store.feature_store import Store
from embeddings.store.files import StoreUnavailable
from embeddings.store.url import StoreUrl


class RemoteStore(Store):
    """A remote store, used through local mirrors of its collections in the cache folder of its URL."""

    is_remote = True

    def __init__(self, url: StoreUrl, names: Callable[[], Iterable[str]], connect: Callable[[str], Remote]):
        super().__init__(url.cache)
        self.url, self._follow_seconds = url.url, url.follow_seconds
        self._list, self._connect = names, connect

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
