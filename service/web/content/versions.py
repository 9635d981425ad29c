"""Two versions of a collection beside each other: their drift, and the map of their vectors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from embeddings.store import Collection
from service.core.errors import invalid
from service.features.snapshots import identity_of
from service.features.store_access import in_store
from service.web.content.drift import drift
from service.web.content.vector_map import maps
from service.web.visit import Visit
from trainer.spec.problems import FieldProblem

NUM_KEPT = 16
"""Comparisons that are remembered: versions do not change, and a map takes a singular value decomposition."""
_kept: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()
_lock = threading.Lock()


async def gather(visit: Visit) -> dict[str, Any]:
    """Compare the versions ``before`` and ``after`` of the query.

    Without them these are the version that is served and the one that it was made from.

    Raises:
        Problem: 404 for a version that is not there, 422 where they cannot be compared.
    """
    return await in_store(_compared, visit)


def _compared(visit: Visit) -> dict[str, Any]:
    collection = visit.collection()
    usable = [one for one in collection.versions() if one["state"] != "expired" and not one["damaged"]]
    shown: dict[str, Any] = {"name": collection.name, "usable": [one["version"] for one in usable][::-1]}
    if len(usable) < 2:
        return {**shown, "before": None, "after": None}
    names = [one["version"] for one in usable]
    after = visit.asked("after") or _served(collection, names)
    before = visit.asked("before") or _earlier(collection, after, names)
    return {**shown, "before": before, "after": after, **_pair(collection, before, after, visit.principal.tenant)}


def _served(collection: Collection, names: list[str]) -> str:
    """Return the version that is served; the newest one where that has none before it."""
    current = collection.current()
    return current if current in names[1:] else names[-1]


def _earlier(collection: Collection, version: str, names: list[str]) -> str:
    """Return the version that a version is compared with: the one it was made from, or that before it."""
    parent = collection.manifest(version)["parent"]
    if parent in names:
        return str(parent)
    return max((one for one in names if one < version), default=names[0])


def _pair(collection: Collection, before: str, after: str, tenant: str) -> dict[str, Any]:
    readers = collection.open(before), collection.open(after)
    if readers[0].dim != readers[1].dim:
        dims = f"{before} has {readers[0].dim} coordinates and {after} {readers[1].dim}"
        raise invalid(FieldProblem("before", dims, "compare versions of one dimension"))
    key = tenant, collection.name, *((one.version, identity_of(one)) for one in readers)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    found = {"drift": drift(*readers), "maps": maps(collection, *readers)}
    with _lock:
        _kept[key] = found
        while len(_kept) > NUM_KEPT:
            _kept.popitem(last=False)
    return found
