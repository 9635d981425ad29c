"""Routes to create, list and delete feature views, and to export a view as the first layer of a frontend model."""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from embeddings.rff.advice import MIN_EPSILON, SAMPLED_ROWS, dim_for, warnings_of
from embeddings.rff.export import onnx_layer, safetensors_layer
from embeddings.store import Collection, Store, default_view
from embeddings.vectors.item_vectors import Array
from service.api.routes.collections import existing
from service.core import errors
from service.core.pagination import Paging, page_of
from service.features.store_access import accepted, in_store, store_of, unchanged
from service.identity.auth import read_features, write_features
from trainer.spec import NAME_PATTERN, Name, View

router = APIRouter(prefix="/v1/views", tags=["views"])


SAFETENSORS = "application/octet-stream"
ONNX = "application/onnx"
LAYERS = {SAFETENSORS: ("safetensors", safetensors_layer), ONNX: ("onnx", onnx_layer)}
"""For each media type, the extension of the file's name and the function that writes the file."""


class ViewRequest(View):
    """A view as in a job spec, and the collection that it belongs to."""

    collection: Name


@router.post(
    "",
    status_code=201,
    dependencies=[write_features],
    responses=errors.also(200, "An identical view exists already; or the response to a dry run.")
    | errors.responses(404, 409, 507),
)
async def create(
    request: Request,
    body: ViewRequest,
    dry_run: Annotated[
        bool, Query(description="Create nothing; return the view that would be created and the recommended dim.")
    ] = False,
    epsilon: Annotated[
        float,
        Query(
            ge=MIN_EPSILON,
            lt=1,
            description="With dry_run: the largest kernel error that the recommended dim may have.",
        ),
    ] = 0.05,
) -> Response:
    """Create a view: 201 for a new view, 200 if an identical view exists.

    The view's random frequencies are drawn and published now. The rows of a materialized view are stored with every
    version published from now on.

    A dry run returns 200 with `view`, `exists`, `advice` and `warnings`. `advice` has the kernel errors by dimension,
    measured on the current version's own vectors. The answer also has the smallest dimension with an error within
    `epsilon`, and the dimension from the theoretical bound of random Fourier features.
    """
    parameters = body.model_dump(exclude={"collection"})

    def make() -> tuple[dict[str, Any], int]:
        collection = existing(request, body.collection)
        if dry_run:
            return _preview(collection, parameters, epsilon), 200
        exists = body.name in collection.view_names()
        view = collection.create_view(**parameters)
        return _with_warnings(collection, view), 200 if exists else 201

    answer, status = await in_store(make)
    headers = {} if dry_run else {"Location": f"/v1/views/{body.name}"}
    return JSONResponse(answer, status, headers=headers)


def _preview(collection: Collection, parameters: dict[str, Any], epsilon: float) -> dict[str, Any]:
    view, exists = collection.preview_view(**parameters)
    answer: dict[str, Any] = {"view": view, "exists": exists, "advice": None, "warnings": []}
    if view["kind"] == "rff":
        vectors = _sampled(collection)
        drawn_by = {name: view[name] for name in ("sigma", "seed", "frequencies")}
        answer["advice"] = dim_for(epsilon, vectors, **drawn_by).as_dict()
        answer["warnings"] = warnings_of(view["dim_in"], view["dim"], **drawn_by, vectors=vectors)
    return answer


def _sampled(collection: Collection) -> Array:
    """Return vectors of items spread evenly over the current version, [<= 1024, d]."""
    reader = collection.open("current")
    rows = np.unique(np.linspace(0, len(reader) - 1, min(len(reader), 2 * SAMPLED_ROWS)).astype(np.int64))
    return reader.lookup(reader.keys[rows])[1]


def _with_warnings(collection: Collection, view: dict[str, Any]) -> dict[str, Any]:
    """Return a view's entry with ``warnings``: for kind ``rff``, some are measured on the current version's vectors."""
    if view["kind"] != "rff" or "map" in view:
        return {**view, "warnings": []}
    drawn, vectors = collection.frequencies(view["name"], "current"), _sampled(collection)
    return {**view, "warnings": warnings_of(view["dim_in"], view["dim"], view["sigma"], vectors=vectors, drawn=drawn)}


@router.get("", dependencies=[read_features], responses=errors.responses(404))
async def list_views(
    request: Request, paging: Paging, collection: Annotated[str | None, Query(pattern=NAME_PATTERN)] = None
) -> dict[str, Any]:
    """List the views of the collections' current versions."""
    store = store_of(request)

    def collect() -> list[dict[str, Any]]:
        names = store.collections() if collection is None else [existing(request, collection).name]
        return sorted(
            (view for name in names for view in store.collection(name).views()), key=lambda view: view["name"]
        )

    return page_of(await in_store(collect), paging, "name")


@router.get("/{name}", dependencies=[read_features], responses=errors.responses(404))
async def get_view(request: Request, name: str) -> dict[str, Any]:
    """Return the view, with `warnings` about its use, each with a remedy."""

    def read() -> dict[str, Any]:
        collection = store_of(request).view_collection(name)
        return _with_warnings(collection, collection.view(name))

    return await in_store(read)


@router.delete("/{name}", status_code=204, dependencies=[write_features], responses=errors.responses(404, 409))
async def delete(request: Request, name: str) -> None:
    def remove() -> None:
        collection = store_of(request).view_collection(name)
        if name == default_view(collection.name):
            detail = f"'{name}' is the default view of collection '{collection.name}' and cannot be deleted."
            raise errors.Problem(409, "default-view", detail)
        collection.delete_view(name)

    await in_store(remove)


@router.get(
    "/{name}/layer",
    dependencies=[read_features],
    response_class=Response,
    responses={
        200: {"content": {SAFETENSORS: {}, ONNX: {}}},
        **errors.also(304, "Unchanged."),
        **errors.responses(404, 406, 409),
    },
)
async def layer(
    request: Request,
    name: str,
    version: str = "current",
    takes: Annotated[
        Literal["published", "model"],
        Query(
            description="The layer's input: vectors as they are served (published), or raw vectors "
            "of the version's model (model)."
        ),
    ] = "published",
) -> Response:
    """Return the view as the first layer of a frontend model: safetensors or, by Accept, ONNX (opset 17, any batch).

    The layer is phi(h) = [cos(U h), sin(U h)] / sqrt(m), with h scaled to unit length. The layer matches the served
    features to 1e-6.

    `takes=model`: the version's alignment R is folded into U, so that the layer takes the raw vectors of the model that
    was published. If the version is a moving average (`averaged` in the metadata), the layer gives features of the
    day's vectors, not of the average. The metadata contains the view, the formula and the sha256 of U; the header
    Content-Digest contains the sha256 of the body.
    """
    media_type = accepted(request.headers.get("accept"), tuple(LAYERS))
    body, version, sha256 = await in_store(_layer, store_of(request), name, version, takes, media_type)
    digest = hashlib.sha256(body)
    headers = {
        "ETag": f'"{digest.hexdigest()}"',
        "Vary": "Accept",
        "Content-Digest": f"sha-256=:{base64.b64encode(digest.digest()).decode()}:",
        "Content-Disposition": f'attachment; filename="{name}.{LAYERS[media_type][0]}"',
        "Evenkeel-Version": version,
        "Evenkeel-Frequencies-Sha256": sha256,
    }
    if unchanged(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def _layer(store: Store, name: str, version: str, takes: str, media_type: str) -> tuple[bytes, str, str]:
    """Return the layer as a file, the version it was made from, and the sha256 of the view's frequencies U."""
    collection = store.view_collection(name)
    manifest = collection.manifest(version)
    version = manifest["version"]
    entry = collection.view(name, version)
    if entry["kind"] != "rff":
        why = "its layer would change nothing" if entry["kind"] == "identity" else "only rff views have a layer"
        raise errors.Problem(409, "no-layer", f"View '{name}' is {entry['kind']}: {why}.")
    if "map" in entry:
        why = f"the layer of its generation {entry['anchor_generation']} takes vectors of '{collection.name}@g"
        raise errors.Problem(409, "no-layer", f"View '{name}' is mapped: {why}{entry['anchor_generation']}'.")
    features = collection.view_features(name, version)
    # A layer of published vectors is the same for all versions of a generation, so its metadata names no version.
    described = {**entry, "takes": takes}
    if takes == "model":
        features = features.fold(collection.rotation(version))
        described |= {"version": version, "averaged": manifest["alignment"].get("new_weight") is not None}
    return LAYERS[media_type][1](features, described), version, entry["sha256"]
