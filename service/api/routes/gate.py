"""Routes for the canaries of a collection's gate."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow.parquet as pq
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from embeddings.refresh import probe
from embeddings.store import NAME_PATTERN
from service.api.routes.collections import CollectionName, existing
from service.core import errors, json_schema, thread_pools
from service.datasets.paths import allowed, data_files
from service.features.store_access import in_store, store_problems
from service.identity.auth import read_features, write_features
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1/collections/{collection}", tags=["gate"])

Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")]


class CanaryRequest(BaseModel):
    """A Parquet file with columns id and label under the data roots, or the collection whose canaries to copy."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=json_schema.either(("name", "uri"), ("copy_from",)))

    name: Name | None = None
    uri: str | None = None
    seed: int = 0
    copy_from: Name | None = None


@router.get("/canaries", dependencies=[read_features], responses=errors.responses(404))
async def list_canaries(request: Request, collection: CollectionName) -> dict[str, Any]:
    def collect() -> dict[str, Any]:
        canaries = existing(request, collection).settings(probe.SETTINGS)
        return {"items": [probe.summary(canary) for canary in canaries.values()]}

    return await in_store(collect)


@router.post("/canaries", status_code=201, dependencies=[write_features], responses=errors.responses(404, 507))
async def add_canaries(request: Request, collection: CollectionName, body: CanaryRequest) -> dict[str, Any]:
    """Fit a canary, a frozen consumer, on the current version; it is evaluated on every candidate from now on."""
    fields_sent = (body.name is not None, body.uri is not None, body.copy_from is not None)
    if fields_sent not in ((True, True, False), (False, False, True)):
        raise errors.invalid(FieldProblem("name", "give name and uri, or copy_from"))

    def fitted() -> dict[str, Any]:
        target = existing(request, collection)
        if body.copy_from is not None:
            names = probe.copy_to(existing(request, body.copy_from), target)
        else:
            assert body.name is not None
            assert body.uri is not None
            settings = request.app.state.settings.for_tenant(request.state.principal.tenant)
            path = allowed(settings, body.uri, "uri")
            # Exactly the files that were checked: the directory may contain others.
            table = pq.read_table(list(data_files(path)))
            missing = {"id", "label"} - set(table.column_names)
            if missing:
                raise errors.invalid(
                    FieldProblem("uri", f"'{body.uri}' lacks the column {' and '.join(sorted(missing))}")
                )
            probe.register(target, body.name, table["id"], table["label"].to_pylist(), seed=body.seed)
            names = [body.name]
        probes = target.settings(probe.SETTINGS)
        return {"items": [probe.summary(probes[name]) for name in names]}

    with store_problems():
        return await thread_pools.in_thread(fitted)


@router.delete("/canaries/{name}", status_code=204, dependencies=[write_features], responses=errors.responses(404))
async def delete_canary(request: Request, collection: CollectionName, name: str) -> Response:
    def remove() -> None:
        target = existing(request, collection)
        if name not in target.settings(probe.SETTINGS):
            raise errors.Problem(404, "canary-not-found", f"Collection '{collection}' has no canary '{name}'.")
        target.save_settings(probe.SETTINGS, name, None)

    await in_store(remove)
    return Response(status_code=204)
