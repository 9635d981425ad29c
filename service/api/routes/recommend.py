"""Routes that recommend items to users, and send the model that turns queries into vectors of users."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictInt, StrictStr

from embeddings.store import Collection
from embeddings.store.queries import NoTower, QueryError
from embeddings.store.users import Recommended, Recommender
from service.api.routes.collections import CollectionName, VersionName, existing
from service.core import errors, json_schema
from service.features.store_access import ids_as, in_store, rereading, unchanged
from service.identity.auth import read_features
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1/collections", tags=["collections"])

MAX_USERS = 1000
MAX_ITEMS = 100_000
"""Most items in a response, over all users."""

ONNX = "application/onnx"
_CHUNK_BYTES = 1 << 20

Id = StrictInt | StrictStr
Ids = Annotated[list[Id], FailFast()]


class RecommendRequest(BaseModel):
    """The users, and the most items for each; ``exclude`` lists items that no user gets.

    ``filter`` maps columns of the item table to values: items have one of the values in each of the columns. Users are
    given by ids, or by features or histories (items, oldest first), which the query tower of the version reads.
    """

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=json_schema.either(("users",), ("features",), ("histories",))
    )

    users: list[Id] | None = Field(default=None, max_length=MAX_USERS)
    features: list[dict[str, Id | list[Id] | None]] | None = Field(default=None, max_length=MAX_USERS)
    histories: list[list[Id]] | None = Field(default=None, max_length=MAX_USERS)
    k: int = Field(default=10, ge=1, le=1000)
    exclude: Ids = Field(default=[], max_length=1000)
    exclude_seen: bool = False
    filter: dict[str, list[Id]] = Field(default={}, max_length=16)
    version: str = "current"


class ScoredItem(BaseModel):
    """An item and its score by the version's model."""

    id: int | str
    score: float


class ForUser(BaseModel):
    """The items of a user, best first.

    ``found`` is false for a user whom the version does not have, and for features or a history without a known id.
    ``id`` is null unless ids of users were given.
    """

    id: int | str | None
    found: bool
    items: list[ScoredItem]


class Recommendations(BaseModel):
    """Items for each user, in request order, from the users and items of one version.

    ``exact`` is false if an index chose the items whose scores were compared; it may have missed some.
    """

    version: str
    exact: bool
    users: list[ForUser]


@router.post(
    "/{collection}/recommend",
    dependencies=[read_features],
    response_model=Recommendations,
    responses=errors.responses(404, 409),
)
async def recommend(request: Request, collection: CollectionName, body: RecommendRequest) -> Response:
    """Return the items of highest score for each user, among all items with a vector.

    With ``exclude_seen``, items are left out that the user had in the training of the version, or that are in the
    history. A version without users, or without a query tower for features or histories, is refused with 409.
    """
    given = [one for one in (body.users, body.features, body.histories) if one is not None]
    if len(given) != 1:
        raise errors.invalid(FieldProblem("users", "give one of users, features and histories"))
    count = len(given[0])
    if count * body.k > MAX_ITEMS:
        message = f"{count} users with {body.k} items each are too many for one answer"
        raise errors.invalid(FieldProblem("users", message, f"ask for at most {MAX_ITEMS // body.k} users at once"))

    def search(target: Collection) -> tuple[list[Any], Recommended]:
        erasures = target.num_erasures()
        recommender = target.recommender(body.version)
        tenant = request.state.principal.tenant
        index = request.app.state.indexes.of_scores(recommender, tenant, erasures=erasures)
        manifest = recommender.reader.manifest
        assert manifest.users is not None
        exclude = ids_as(manifest.id_type, body.exclude)
        users = None if body.users is None else ids_as(manifest.users["id_type"], body.users)
        found = recommender.top(
            users, body.k, features=_features(recommender, body.features),
            histories=None if body.histories is None else [ids_as(manifest.id_type, one) for one in body.histories],
            exclude=exclude, exclude_seen=body.exclude_seen, filter=_filter(recommender, body.filter),
            index=index,
        )  # fmt: skip
        return users or [None] * count, found

    def answer() -> bytes:
        target = existing(request, collection)
        try:
            users, found = rereading(target, lambda: search(target))
        except QueryError as error:
            raise errors.invalid(FieldProblem(error.field, error.message, error.remedy)) from None
        results = [
            {
                "id": user,
                "found": known,
                "items": [{"id": item, "score": score} for item, score in zip(*of, strict=True)],
            }
            for user, known, *of in zip(users, found.found.tolist(), found.items, found.scores, strict=True)
        ]
        return orjson.dumps({"version": found.version, "exact": found.exact, "users": results})

    return Response(await in_store(answer), media_type="application/json")


def _features(recommender: Recommender, features: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return features with ids of the types that the version's query tower reads; it refuses unknown features."""
    inputs = (recommender.reader.manifest.users or {}).get("tower", {}).get("inputs", {})

    def converted(name: str, value: Any) -> Any:
        if value is None or name not in inputs:
            return value
        ids = ids_as(inputs[name]["ids"], value if isinstance(value, list) else [value])
        return ids if isinstance(value, list) else ids[0]

    return None if features is None else [{name: converted(name, one[name]) for name in one} for one in features]


def _filter(recommender: Recommender, filter: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return values of the types that the version's columns have; it refuses unknown columns."""
    columns = (recommender.reader.manifest.users or {}).get("columns", {})
    return {name: ids_as(columns[name]["ids"], one) if name in columns else one for name, one in filter.items()}


@router.get(
    "/{collection}/versions/{version}/tower",
    dependencies=[read_features],
    response_class=StreamingResponse,
    responses={200: {"content": {ONNX: {}}}, **errors.also(304, "Unchanged."), **errors.responses(404, 409)},
)
async def tower(request: Request, collection: CollectionName, version: VersionName) -> Response:
    """Return the query tower of a version as ONNX: from features or a history to a user's vector.

    The vector is in the coordinates of the version, whose alignment is folded in. The header Content-Digest has the
    sha256 of the body. A version without a query tower is refused with 409.
    """

    def find() -> tuple[Recommender, str]:
        recommender = existing(request, collection).recommender(version)
        file = recommender.reader.manifest.tower_file
        if file is None:
            raise NoTower(f"version {recommender.version} of '{collection}' has no query tower")
        return recommender, file.sha256

    recommender, sha256 = await in_store(find)
    headers = {
        "ETag": f'"{sha256}"',
        "Content-Digest": f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:",
        "Content-Disposition": f'attachment; filename="{collection}-{recommender.version}.onnx"',
        "Evenkeel-Version": recommender.version,
    }
    if unchanged(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    assert recommender.tower is not None
    data = memoryview(recommender.tower)

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(data), _CHUNK_BYTES):
            yield bytes(data[start : start + _CHUNK_BYTES])

    headers["Content-Length"] = str(len(data))
    return StreamingResponse(chunks(), headers=headers, media_type=ONNX)
