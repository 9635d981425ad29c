"""Scratch collections, to which the null refreshes of a calibration are published.

Whoever erases an id from a collection means the vectors of its null refreshes too: they are of the same items. So an id
is erased from both, and what a collection has erased is not published to a scratch collection of it. Scratch
collections are known by their names alone. Of a long name they have the beginning, and belong to every collection whose
name begins with it.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from embeddings.store import Store
    from embeddings.vectors.item_vectors import Array

_NAME = re.compile(r"(.+)-nulls-[0-9a-f]{8}")
_ORIGIN_LENGTH = 48
"""So much of a collection's name that a scratch name has no more than the 63 characters that names may have."""


def scratch_name(collection: str) -> str:
    """Return a new name for the nulls of a collection."""
    return f"{collection[:_ORIGIN_LENGTH]}-nulls-{secrets.token_hex(4)}"


def is_scratch(name: str) -> bool:
    """Return whether a collection has such a name: nobody is served from it, nor refreshes it."""
    return _NAME.fullmatch(name) is not None


def scratch_names(store: Store, collection: str) -> list[str]:
    """Return the scratch collections of a collection."""
    return [name for name in store.collections() if _is_scratch_of(name, collection)]


def _is_scratch_of(name: str, collection: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and match[1] == collection[:_ORIGIN_LENGTH]


# --- erasure ---------------------------------------------------------------------------------------------------------


def erase(store: Store, collection: str, ids: Any, reason: str, *, key: str | None = None) -> dict[str, Any]:
    """Erase ids from a collection and from its scratch collections.

    Args:
        store: the store of the collection.
        collection: its name.
        ids: of the collection's type.
        reason: kept with the erasure.
        key: the id of the API key that asked for it.

    Returns:
        What ``Collection.erase`` says of the collection itself; it raises what that does.
    """
    target = store.collection(collection)
    id_type = target.id_type()
    cleared: set[str] = set()

    def clear() -> None:
        for name in scratch_names(store, collection):
            # Ids of another type are none of these.
            if name not in cleared and store.collection(name).id_type() == id_type:
                store.collection(name).erase(ids, reason, key=key)
            cleared.add(name)

    # First, so that an erasure that is recorded in the collection is in all of them.
    clear()
    done = target.erase(ids, reason, key=key)
    # A null refresh that began before may have been the first of its scratch collection.
    clear()
    return done


def erased_in_origin(store: Store, name: str, keys: Array) -> Array:
    """Return which of ``keys`` were erased from what a scratch collection is of, bool [n]; none for other names."""
    erased = np.zeros(len(keys), dtype=np.bool_)
    if is_scratch(name):
        for origin in store.collections():
            if _is_scratch_of(name, origin):
                erased |= store.collection(origin).erased().matches(keys)
    return erased


def erase_as_origin(store: Store, name: str, version: str) -> None:
    """Erase from a scratch collection those items of a version that were erased from its origin while it was made.

    Nothing is done in other collections.
    """
    if not is_scratch(name):
        return
    target = store.collection(name)
    keys = target.open(version).keys
    gone = keys[erased_in_origin(store, name, keys)]
    if len(gone):
        target.erase(gone, "erased from the collection that is calibrated")
