"""Collections and their versions in the feature store: manifests, promotion, snapshots and neighbours."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from embeddings.store import Collection, UnknownCollection
from service.core import errors, json_schema
from service.core.pagination import Paging, page_of
from service.features.snapshots import PARQUET, parquet_chunks
from service.features.store_access import in_store, store_of, unchanged
from service.features.summaries import summary
from service.identity import idempotency
from service.identity.auth import FeaturesWriter, read_features
from service.identity.idempotency import IdempotencyKey
from trainer.spec import NAME_PATTERN
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1/collections", tags=["collections"])

CollectionName = Annotated[str, Path(pattern=NAME_PATTERN)]
VersionName = Annotated[str, Path(pattern=errors.CURRENT_OR_VERSION)]
"""A version, or ``current``."""


class Promotion(BaseModel):
    """The reason for a promotion, which is refused if ``if_current`` names a version that is no longer current."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(min_length=1, max_length=1000)
    override_gate: bool = False
    if_current: str | None = None


class NeighborsRequest(BaseModel):
    """An id, or a vector of the collection's dimension, and the maximum number of neighbours."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=json_schema.either(("id",), ("vector",)))

    id: StrictInt | StrictStr | None = None
    vector: list[float] | None = None
    k: int = Field(default=10, ge=1, le=1000)
    version: str = "current"


@router.get("", dependencies=[read_features])
async def list_collections(request: Request, paging: Paging) -> dict[str, Any]:
    store = store_of(request)

    def collect() -> list[dict[str, Any]]:
        return [summary(store.collection(name)) for name in store.collections()]

    return page_of(await in_store(collect), paging, "name")


@router.get("/{collection}", dependencies=[read_features], responses=errors.responses(404))
async def get_collection(request: Request, collection: CollectionName) -> dict[str, Any]:
    def collect() -> dict[str, Any]:
        target = existing(request, collection)
        return {**summary(target), "history": target.history()[::-1]}

    return await in_store(collect)


@router.get("/{collection}/versions", dependencies=[read_features], responses=errors.responses(404))
async def list_versions(
    request: Request, collection: CollectionName, paging: Paging, state: str | None = None
) -> dict[str, Any]:
    def collect() -> list[dict[str, Any]]:
        manifests = existing(request, collection).versions()[::-1]
        return [manifest for manifest in manifests if state is None or manifest["state"] == state]

    return page_of(await in_store(collect), paging, "version", descending=True)


@router.get("/{collection}/versions/{version}", dependencies=[read_features], responses=errors.responses(404))
async def get_version(request: Request, collection: CollectionName, version: VersionName) -> dict[str, Any]:
    """Return the manifest of a version; ``current`` means the version that is served."""
    return await in_store(lambda: existing(request, collection).manifest(version))


@router.post("/{collection}/versions/{version}/promote", responses=errors.responses(404, 409, 507))
async def promote(
    request: Request,
    collection: CollectionName,
    version: Annotated[str, Path(pattern=errors.VERSION)],
    body: Promotion,
    principal: FeaturesWriter,
    idempotency_key: IdempotencyKey = None,
) -> dict[str, Any]:
    """Make a version the current version, atomically, and return its manifest.

    Promoting an older version is a rollback. The reason and the key's id are kept in the collection's history, and also
    in the manifest if the version was promoted despite the gate.
    """

    def switch() -> dict[str, Any]:
        target = existing(request, collection)
        target.promote(version, body.reason, body.override_gate, body.if_current, key=principal.key_id)
        return target.manifest(version)

    async def act(reservation: idempotency.Reservation | None) -> dict[str, Any]:
        manifest = await in_store(switch)
        if reservation is not None:
            # If the process dies before this, the client's retry promotes the version again, which changes nothing.
            async with request.app.state.database.write() as connection:
                await idempotency.complete(connection, reservation, answer=manifest)
        return manifest

    request_text = f"promote {principal.tenant} {collection} {version} {body.model_dump_json()}"
    made = await idempotency.once(request.app.state.database, principal.key_id, idempotency_key, request_text, act)
    return made.answer or {} if isinstance(made, idempotency.Done) else made


@router.get(
    "/{collection}/versions/{version}/snapshot",
    dependencies=[read_features],
    response_class=StreamingResponse,
    responses={200: {"content": {PARQUET: {}}}, **errors.also(304, "Unchanged."), **errors.responses(404)},
)
async def snapshot(request: Request, collection: CollectionName, version: VersionName) -> Response:
    """Stream every vector of a version as Parquet, row group by row group: id, status, norm, count, vector."""
    reader = await in_store(lambda: existing(request, collection).open(version))
    etag = f'"{collection}-{reader.version}-{reader.manifest.identity}-parquet"'
    headers = {"Evenkeel-Version": reader.version, "ETag": etag}
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    headers["Content-Disposition"] = f'attachment; filename="{collection}-{reader.version}.parquet"'
    return StreamingResponse(parquet_chunks(reader), headers=headers, media_type=PARQUET)


@router.post("/{collection}/neighbors", dependencies=[read_features], responses=errors.responses(404))
async def neighbors(request: Request, collection: CollectionName, body: NeighborsRequest) -> dict[str, Any]:
    """Return the items with the highest cosine to an id or a vector, best first, computed from the published vectors.

    If ``exact`` is false, an index chose the candidates and may have missed some.
    """
    if (body.id is None) == (body.vector is None):
        raise errors.invalid(FieldProblem("id", "give either id or vector"))

    def answer() -> dict[str, Any]:
        query: Any = body.vector if body.id is None else body.id
        nearest = request.app.state.indexes.find
        return dict(nearest(existing(request, collection), query, body.k, body.version, request.state.principal.tenant))

    return await in_store(answer)


def existing(request: Request, name: str) -> Collection:
    """Return the collection of this name.

    Raises:
        UnknownCollection: No such collection exists.
    """
    store = store_of(request)
    collection = store.collection(name)
    if not collection.exists():
        raise UnknownCollection(
            f"there is no collection '{name}' (there are: {', '.join(store.collections()) or 'none'})"
        )
    return collection
