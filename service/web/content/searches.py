"""Searches of a collection: neighbours of an item, in one version or in two, and the best items for a user."""

from __future__ import annotations

from typing import Any

from embeddings.store import Collection
from service.core.errors import Problem
from service.features.store_access import ids_as, in_store, rereading
from service.web.content.item_words import words_of
from service.web.request import DashboardRequest

NUM_NEIGHBORS = 10
NUM_RECOMMENDED = 20
APPROXIMATE = " (approximate, from an index)"


async def gather_neighbors(request: DashboardRequest) -> dict[str, Any]:
    """Return the neighbours of the query's ``wanted`` item in ``version``, and in ``other`` if it is given.

    Raises:
        Problem: 404 for an item that a version does not have.
    """
    return {"lists": await in_store(_neighbors, request)}


async def gather_recommended(request: DashboardRequest) -> dict[str, Any]:
    """Return the best items for the query's ``user`` by ``version``; with ``unseen``, without those of training.

    Raises:
        Problem: 404 for a user whom the version does not have, or who has seen every item.
    """
    return {"lists": await in_store(_recommended, request)}


def _neighbors(request: DashboardRequest) -> list[dict[str, Any]]:
    collection, find = request.collection(), request.state.indexes.find
    versions = [request.asked("version") or "current", *filter(None, [request.asked("other")])]
    item, tenant = request.asked("wanted") or "", request.principal.tenant
    found = [find(collection, item, NUM_NEIGHBORS, version, tenant) for version in versions]
    lists = []
    for one in found:
        heading = one["version"] + ("" if one["exact"] else APPROXIMATE)
        rows = [(entry["id"], entry["cosine"]) for entry in one["items"]]
        others = [{entry["id"] for entry in other["items"]} for other in found if other is not one]
        lists.append(_listed(collection, one["version"], heading, rows, others))
    return lists


def _recommended(request: DashboardRequest) -> list[dict[str, Any]]:
    collection = request.collection()

    def search() -> list[dict[str, Any]]:
        erasures = collection.num_erasures()
        recommender = collection.recommender(request.asked("version") or "current")
        version, manifest = recommender.version, recommender.reader.manifest
        assert manifest.users is not None
        (user,) = ids_as(manifest.users["id_type"], [request.asked("user") or ""])
        index = request.state.indexes.of_scores(recommender, request.principal.tenant, erasures=erasures)
        is_unseen = request.asked("unseen") is not None
        found = recommender.top([user], NUM_RECOMMENDED, exclude_seen=is_unseen, index=index)
        if not found.found[0]:
            detail = (
                f"{version} has no user {user}. It has the users of its job's training rows: check the id, or publish "
                "again with rows of this user."
            )
            raise Problem(404, "user-not-found", detail)
        if not found.items[0]:
            raise Problem(404, "nothing-unseen", f"{version} has no item that user {user} has not seen.")
        rows = list(zip(found.items[0], found.scores[0], strict=True))
        heading = f"{version}: user {user}, by score{'' if found.exact else APPROXIMATE}"
        return [_listed(collection, version, heading, rows, [])]

    return rereading(collection, search)


def _listed(
    collection: Collection, version: str, heading: str, rows: list[tuple[Any, float]], others: list[set[Any]]
) -> dict[str, Any]:
    """Return a list of (id, figure) with the items' words; those that no other list has are marked ``is_new``."""
    words = words_of(collection.item_columns(version), [identifier for identifier, _ in rows])
    found = [
        {
            "id": identifier, "figure": figure, "words": text,
            "is_new": bool(others) and not any(identifier in other for other in others),
        }
        for (identifier, figure), text in zip(rows, words, strict=True)
    ]  # fmt: skip
    return {"heading": heading, "rows": found}
