"""Erasing ids from a collection's versions, and letting them in again."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from service import errors
from service.auth import Principal, require
from service.features import ids_as, in_store
from service.routes.collections import existing

router = APIRouter(prefix="/v1/collections", tags=["collections"])

Writer = Annotated[Principal, Depends(require("features:write"))]


class Ids(BaseModel):
    """Which ids, and why; the reason is kept, the ids as hashes."""

    model_config = ConfigDict(extra="forbid")

    ids: list[StrictInt | StrictStr] = Field(min_length=1, max_length=100_000)
    reason: str = Field(min_length=1, max_length=1000)


class Erased(BaseModel):
    """The versions that were rewritten, and how many rows they lost in all."""

    versions: list[str]
    rows: int


class Readmitted(BaseModel):
    """How many of the ids had been erased."""

    ids: int


@router.post("/{collection}/erase", responses=errors.responses(404, 507))
async def erase(request: Request, collection: str, body: Ids, principal: Writer) -> Erased:
    """Removes the rows of ids from every kept version; they stay out until they are readmitted."""

    def remove() -> dict[str, Any]:
        found = existing(request, collection)
        done = found.erase(ids_as(found.id_type(), body.ids), body.reason, key=principal.key_id)
        request.app.state.neighbors.forget(collection)
        return done

    return Erased(**await in_store(remove))


@router.post("/{collection}/readmit", responses=errors.responses(404, 507))
async def readmit(request: Request, collection: str, body: Ids, principal: Writer) -> Readmitted:
    """Lets erased ids be published again, by the next run that finds them."""

    def admit() -> int:
        found = existing(request, collection)
        return found.readmit(ids_as(found.id_type(), body.ids), body.reason, key=principal.key_id)

    return Readmitted(ids=await in_store(admit))


@router.get("/{collection}/erasures", dependencies=[Depends(require("features:read"))], responses=errors.responses(404))
async def erasures(request: Request, collection: str) -> dict[str, Any]:
    """What was erased and readmitted, newest first: when, why, by which key, how many ids and rows; never which."""
    return {"items": await in_store(lambda: existing(request, collection).erasures()[::-1]), "next_cursor": None}
