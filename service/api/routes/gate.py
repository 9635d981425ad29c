"""Routes for the canaries of a collection's gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from embeddings.refresh import probe
from embeddings.store import NAME_PATTERN
from service.api.routes.collections import CollectionName, existing
from service.core import errors, json_schema, thread_pools
from service.datasets.paths import allowed, data_files, data_problem
from service.features.store_access import in_store, store_problems
from service.identity.auth import read_features, write_features
from trainer.data.columns.values import as_ids, id_kind
from trainer.data.errors import DataError
from trainer.data.sources.readers.registry import SUFFIXES, reader_of
from trainer.data.sources.source import Source, SourceFile
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1/collections/{collection}", tags=["gate"])

Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")]
Column = Annotated[str, Field(min_length=1, max_length=255)]


class CanaryRequest(BaseModel):
    """A table under the data roots with columns of ids and labels, or the collection whose canaries to copy."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=json_schema.either(("name", "uri"), ("copy_from",)))

    name: Name | None = None
    uri: str | None = None
    id_column: Column = "id"
    label_column: Column = "label"
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
            try:
                ids, labels = labelled(path, body.id_column, body.label_column)
            except DataError as error:
                raise data_problem(error, "uri") from None
            probe.register(target, body.name, ids, labels, seed=body.seed)
            names = [body.name]
        probes = target.settings(probe.SETTINGS)
        return {"items": [probe.summary(probes[name]) for name in names]}

    with store_problems():
        return await thread_pools.in_thread(fitted)


def labelled(path: Path, id_column: str, label_column: str) -> tuple[pa.Array, list[Any]]:
    """Return the ids and labels of a table's rows that have an id.

    Raises:
        DataError: there is no table, a column is missing, or the table cannot be read.
    """
    # Exactly the files that were checked: the directory may contain others.
    files = [SourceFile(file) for file in data_files(path) if reader_of(file.name) is not None]
    if not files:
        raise DataError("holds no table", where=str(path), remedy=f"name a file that ends in {', '.join(SUFFIXES)}")
    source = Source(str(path), ids=(id_column,), only=files)
    missing = sorted({id_column, label_column} - set(source.column_names()))
    if missing:
        remedy = f"name columns of the table: {', '.join(source.column_names())}"
        raise DataError(f"lacks the column {' and '.join(missing)}", where=str(path), remedy=remedy)
    source.require([id_column, label_column])
    kind = id_kind(source.column_type(id_column), f"{path}, column '{id_column}'")
    ids, labels = [], []
    for chunk in source.stream([id_column, label_column]):
        ids.append(as_ids(chunk.column(id_column), kind, chunk.where(id_column)))
        labels += chunk.column(label_column).to_pylist()
    of_rows = pa.concat_arrays(ids) if ids else pa.array([], pa.int64())
    has_id = of_rows.is_valid()
    return of_rows.filter(has_id), [label for label, there in zip(labels, has_id.to_pylist(), strict=True) if there]


@router.delete("/canaries/{name}", status_code=204, dependencies=[write_features], responses=errors.responses(404))
async def delete_canary(request: Request, collection: CollectionName, name: str) -> Response:
    def remove() -> None:
        target = existing(request, collection)
        if name not in target.settings(probe.SETTINGS):
            raise errors.Problem(404, "canary-not-found", f"Collection '{collection}' has no canary '{name}'.")
        target.save_settings(probe.SETTINGS, name, None)

    await in_store(remove)
    return Response(status_code=204)
