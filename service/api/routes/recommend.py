"""Route that recommends items to the users of a version."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictInt, StrictStr

from embeddings.store import Collection
from embeddings.store.users import Recommended
from service.api.routes.collections import CollectionName, existing
from service.core import errors
from service.features.store_access import ids_as, in_store, rereading
from service.identity.auth import read_features
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1/collections", tags=["collections"])

MAX_USERS = 1000
MAX_ITEMS = 100_000
"""Most items in a response, over all users."""

Ids = Annotated[list[StrictInt | StrictStr], FailFast()]


class RecommendRequest(BaseModel):
    """The users, and the most items for each; ``exclude`` lists items that nobody gets."""

    model_config = ConfigDict(extra="forbid")

    users: Ids = Field(max_length=MAX_USERS)
    k: int = Field(default=10, ge=1, le=1000)
    exclude: Ids = Field(default=[], max_length=1000)
    exclude_seen: bool = False
    version: str = "current"


class ScoredItem(BaseModel):
    """An item and its score by the version's model."""

    id: int | str
    score: float


class ForUser(BaseModel):
    """The items of a user, best first; ``found`` is false for a user whom the version does not have."""

    id: int | str
    found: bool
    items: list[ScoredItem]


class Recommendations(BaseModel):
    """Items for each user, in request order, from the users and items of one version."""

    version: str
    users: list[ForUser]


@router.post(
    "/{collection}/recommend",
    dependencies=[read_features],
    response_model=Recommendations,
    responses=errors.responses(404, 409),
)
async def recommend(request: Request, collection: CollectionName, body: RecommendRequest) -> Response:
    """Return the items of highest score for each user, by exact search over all items with a vector.

    With ``exclude_seen``, items are left out that the user had in the training of the version. A version without users
    is refused with 409.
    """
    if len(body.users) * body.k > MAX_ITEMS:
        message = f"{len(body.users)} users with {body.k} items each are too many for one answer"
        raise errors.invalid(FieldProblem("users", message, f"ask for at most {MAX_ITEMS // body.k} users at once"))

    def search(target: Collection) -> tuple[list[Any], Recommended]:
        recommender = target.recommender(body.version)
        manifest = recommender.reader.manifest
        assert manifest.users is not None
        users = ids_as(manifest.users["id_type"], body.users)
        exclude = ids_as(manifest.id_type, body.exclude)
        return users, recommender.top(users, body.k, exclude=exclude, exclude_seen=body.exclude_seen)

    def answer() -> bytes:
        target = existing(request, collection)
        users, found = rereading(target, lambda: search(target))
        results = [
            {
                "id": user,
                "found": known,
                "items": [{"id": item, "score": score} for item, score in zip(*of, strict=True)],
            }
            for user, known, *of in zip(users, found.found.tolist(), found.items, found.scores, strict=True)
        ]
        return orjson.dumps({"version": found.version, "users": results})

    return Response(await in_store(answer), media_type="application/json")
