"""Feature views: created, listed, deleted, and handed out as the first layer of a frontend model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from safetensors.numpy import save

from embeddings.store import Store, default_view
from embeddings.vectors import Array
from service import errors
from service.auth import require
from service.features import accepted, in_store, page_of, store_of, unchanged
from service.routes.collections import existing
from trainer.spec import Name, View

router = APIRouter(prefix="/v1/views", tags=["views"])

read_features = Depends(require("features:read"))
write_features = Depends(require("features:write"))

SAFETENSORS = "application/octet-stream"


class ViewRequest(View):
    """A view as a job spec has it, and the collection it is of."""

    collection: Name


@router.post(
    "",
    status_code=201,
    dependencies=[write_features],
    responses=errors.also(200, "It is there, just so.") | errors.responses(404, 409, 507),
)
async def create(request: Request, body: ViewRequest) -> Response:
    """201 for a new view; 200 for one that exists just so. Frequencies are drawn and published now."""

    def make() -> tuple[dict[str, Any], bool]:
        collection = existing(request, body.collection)
        known = body.name in collection.view_names()
        parameters = body.model_dump(exclude={"name", "collection"})
        return collection.create_view(body.name, **parameters), known

    view, known = await in_store(make)
    return JSONResponse(view, 200 if known else 201, headers={"Location": f"/v1/views/{body.name}"})


@router.get("", dependencies=[read_features], responses=errors.responses(404))
async def list_views(
    request: Request,
    collection: str | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: str | None = None,
) -> dict[str, Any]:
    """Views that the current versions can be fetched through."""
    store = store_of(request)

    def collect() -> list[dict[str, Any]]:
        names = store.collections() if collection is None else [existing(request, collection).name]
        return sorted(
            (view for name in names for view in store.collection(name).views()), key=lambda view: view["name"]
        )

    return page_of(await in_store(collect), limit, cursor, "name", descending=False)


@router.get("/{name}", dependencies=[read_features], responses=errors.responses(404))
async def get_view(request: Request, name: str) -> dict[str, Any]:
    return await in_store(lambda: store_of(request).view_collection(name).view(name))


@router.delete("/{name}", status_code=204, dependencies=[write_features], responses=errors.responses(404, 409))
async def delete(request: Request, name: str) -> None:
    await in_store(_delete, store_of(request), name)


def _delete(store: Store, name: str) -> None:
    collection = store.view_collection(name)
    if name == default_view(collection.name):
        detail = f"'{name}' is what collection '{collection.name}' serves by its own name: it stays."
        raise errors.Problem(409, "default-view", detail)
    collection.delete_view(name)


@router.get(
    "/{name}/layer",
    dependencies=[read_features],
    response_class=Response,
    responses={
        200: {"content": {SAFETENSORS: {}}},
        **errors.also(304, "Unchanged."),
        **errors.responses(404, 406, 409),
    },
)
async def layer(request: Request, name: str, version: str = "current") -> Response:
    """The view as the first layer of a frontend model: U in safetensors, phi(h) = [cos(U h), sin(U h)] / sqrt(m).

    The file's metadata has the view's parameters and the sha256 of U.
    """
    accepted(request.headers.get("accept"), (SAFETENSORS,))
    entry, frequencies = await in_store(_frequencies, store_of(request), name, version)
    etag = f'"{entry["sha256"]}"'
    headers = {"ETag": etag, "Content-Disposition": f'attachment; filename="{name}.safetensors"'}
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    metadata = {key: str(value) for key, value in entry.items()}
    metadata["formula"] = "phi(h) = [cos(U h), sin(U h)] / sqrt(m), with h of unit norm and m rows in U"
    return Response(save({"frequencies": frequencies}, metadata), headers=headers, media_type=SAFETENSORS)


def _frequencies(store: Store, name: str, version: str) -> tuple[dict[str, Any], Array]:
    collection = store.view_collection(name)
    entry = collection.view(name, version)
    if entry["kind"] != "rff":
        raise errors.Problem(409, "no-layer", f"View '{name}' is {entry['kind']}: its layer would change nothing.")
    return entry, collection.frequencies(name, version)
