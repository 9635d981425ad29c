"""Scratch collections: copies of a collection's items that earlier releases published for null refreshes.

Scratch collections have no readers, and this release does not publish to them. Since they hold vectors of the same
items, ids are erased from them too. Scratch collections are recognized only by name. The name contains at most the
first 48 characters of the collection's name, so it may belong to several collections.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embeddings.store import Store

_NAME = re.compile(r"(.+)-nulls-[0-9a-f]{8}")
_ORIGIN_LENGTH = 48
"""Largest number of characters of the collection's name that a scratch collection's name contains."""


def is_scratch(name: str) -> bool:
    """Return True if ``name`` is that of a scratch collection."""
    return _NAME.fullmatch(name) is not None


def scratch_names(store: Store, collection: str) -> list[str]:
    """Return the names of a collection's scratch collections."""
    matches = ((name, _NAME.fullmatch(name)) for name in store.collections())
    return [name for name, match in matches if match is not None and match[1] == collection[:_ORIGIN_LENGTH]]


def erase(store: Store, collection: str, ids: Any, reason: str, *, key: str | None = None) -> dict[str, Any]:
    """Erase ids from a collection and its scratch collections, while ``Collection.erase`` omits scratch collections."""
    target = store.collection(collection)
    # Scratch collections first, so that an erasure recorded in the collection was applied to all of them.
    for scratch in map(store.collection, scratch_names(store, collection)):
        # Ids of another type cannot match.
        if scratch.id_type() == target.id_type():
            scratch.erase(ids, reason, key=key)
    return target.erase(ids, reason, key=key)
