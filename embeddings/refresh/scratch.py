"""Scratch collections: copies of a collection's items that null refreshes of earlier versions published.

Nobody is served from them and nothing is published to them. They hold vectors of the same items, so an id is erased
from them too. They are known by their names alone. Of a long name they have the beginning, and belong to every
collection whose name begins with it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embeddings.store import Store

_NAME = re.compile(r"(.+)-nulls-[0-9a-f]{8}")
_ORIGIN_LENGTH = 48
"""Characters of the collection's name that a scratch name begins with, at most."""


def is_scratch(name: str) -> bool:
    """Tell the name of a scratch collection from others."""
    return _NAME.fullmatch(name) is not None


def scratch_names(store: Store, collection: str) -> list[str]:
    """List the scratch collections of a collection."""
    matches = ((name, _NAME.fullmatch(name)) for name in store.collections())
    return [name for name, match in matches if match is not None and match[1] == collection[:_ORIGIN_LENGTH]]


def erase(store: Store, collection: str, ids: Any, reason: str, *, key: str | None = None) -> dict[str, Any]:
    """Erase ids from a collection and from its scratch collections, as ``Collection.erase`` does from it alone."""
    target = store.collection(collection)
    # First, so that an erasure that is recorded in the collection is in all of them.
    for scratch in map(store.collection, scratch_names(store, collection)):
        # Ids of another type are none of these.
        if scratch.id_type() == target.id_type():
            scratch.erase(ids, reason, key=key)
    return target.erase(ids, reason, key=key)
