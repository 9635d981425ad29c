"""The list of collections: what each serves, and what is held of it."""

from __future__ import annotations

from typing import Any

from service.features.store_access import in_store
from service.features.summaries import summary
from service.web.content.held import held_now
from service.web.visit import Visit


async def gather(visit: Visit) -> dict[str, Any]:
    """Return the collections of the visitor's tenant."""
    return {"collections": await in_store(listed, visit)}


def listed(visit: Visit) -> list[dict[str, Any]]:
    """Return the summary of each collection of the visitor's tenant, with what is held of it now."""
    shown = []
    for name in visit.store.collections():
        collection = visit.store.collection(name)
        one = summary(collection)
        shown.append({**one, "held_now": held_now(collection, one["held"])})
    return shown
