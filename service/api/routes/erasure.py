"""Routes to erase ids from a collection's versions and to readmit them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictInt, StrictStr

from embeddings.refresh import scratch
from embeddings.store.collection.erasure import ITEMS, USERS, Part
from service.api.routes.collections import CollectionName, existing
from service.core import errors
from service.features.store_access import ids_as, in_store, store_of, store_problems
from service.identity.auth import FeaturesWriter, read_features

router = APIRouter(prefix="/v1/collections", tags=["collections"])

Result = TypeVar("Result")
# An erasure waits for the one before it, perhaps for minutes, and must not block the threads that fetches need.
_threads = ThreadPoolExecutor(4, thread_name_prefix="erasure")


class Ids(BaseModel):
    """The ids to erase and the reason. The reason is kept; the ids are kept only as hashes.

    ``part``: items, or users whom a job has published with its items.
    """

    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[StrictInt | StrictStr], FailFast()] = Field(min_length=1, max_length=100_000)
    reason: str = Field(min_length=1, max_length=1000)
    part: Part = ITEMS


class Erased(BaseModel):
    """The versions that were rewritten, and the total number of rows removed from them."""

    versions: list[str]
    rows: int


class Readmitted(BaseModel):
    """The number of the given ids that had been erased and may be published again."""

    ids: int


async def _in_turn(call: Callable[[], Result]) -> Result:
    """Call ``call`` as ``in_store`` does, but in one of the threads reserved for erasing and readmitting ids."""
    context = contextvars.copy_context()
    with store_problems():
        return await asyncio.get_running_loop().run_in_executor(_threads, lambda: context.run(call))


@router.post("/{collection}/erase", responses=errors.responses(404, 409, 507))
async def erase(request: Request, collection: CollectionName, body: Ids, principal: FeaturesWriter) -> Erased:
    """Remove the rows of the ids from every kept version; later versions leave the ids out until they are readmitted.

    The rows are also removed from the collection's scratch collections. The response does not count those.
    """

    def remove() -> dict[str, Any]:
        target, store = existing(request, collection), store_of(request)
        ids = ids_as(target.id_type(body.part), body.ids)
        if body.part == USERS:
            return target.erase(ids, body.reason, key=principal.key_id, part=USERS)
        done = scratch.erase(store, collection, ids, body.reason, key=principal.key_id)
        for name in (collection, *scratch.scratch_names(store, collection)):
            request.app.state.indexes.forget(name, principal.tenant)
        return done

    return Erased(**await _in_turn(remove))


@router.post("/{collection}/readmit", responses=errors.responses(404, 409, 507))
async def readmit(request: Request, collection: CollectionName, body: Ids, principal: FeaturesWriter) -> Readmitted:
    """Allow erased ids to be published again, by the next run whose data contains them."""

    def admit() -> int:
        target = existing(request, collection)
        ids = ids_as(target.id_type(body.part), body.ids)
        return target.readmit(ids, body.reason, key=principal.key_id, part=body.part)

    return Readmitted(ids=await _in_turn(admit))


@router.get("/{collection}/erasures", dependencies=[read_features], responses=errors.responses(404))
async def erasures(request: Request, collection: CollectionName) -> dict[str, Any]:
    """List erasures and readmissions, newest first: time, reason, key, number of ids and of rows, but never the ids."""
    return {"items": await in_store(lambda: existing(request, collection).erasures()[::-1]), "next_cursor": None}
