"""Routes to register, list, profile and delete datasets, and to propose a dataset from a file."""

from __future__ import annotations

import functools
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.core import errors, pagination, tables, thread_pools
from service.core.pagination import Page, Paging
from service.core.rows import DatasetRow
from service.datasets import registry
from service.identity.auth import JobsReader, JobsWriter
from trainer.spec import DatasetSpec, Name
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])


class InferRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    uri: str = Field(min_length=1)
    name: Name | None = None


@router.post(
    "",
    status_code=201,
    responses=errors.also(200, "An identical dataset was registered before.") | errors.responses(409),
)
async def register(request: Request, response: Response, body: DatasetSpec, principal: JobsWriter) -> dict[str, Any]:
    settings = request.app.state.settings.for_tenant(principal.tenant)
    await registry.in_check_thread(body, functools.partial(registry.check_files, settings, body))
    database = request.app.state.database
    async with database.write() as connection:
        shown, new = await registry.register(database, connection, body, principal.tenant)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/datasets/{body.name}"
    return shown


@router.get("")
async def list_datasets(request: Request, principal: JobsReader, paging: Paging) -> Page[dict[str, Any]]:
    table = tables.dataset
    query = sa.select(table).where(table.c.tenant == principal.tenant)
    async with request.app.state.database.read() as connection:
        return await pagination.page(
            connection, DatasetRow, query, table.c.name, paging, registry.view, descending=False
        )


@router.post("/infer")
async def propose(request: Request, body: InferRequest, principal: JobsWriter) -> dict[str, Any]:
    """Propose a manifest for a file under the data roots; review and correct it before registering it."""
    settings = request.app.state.settings.for_tenant(principal.tenant)
    return await thread_pools.in_thread(registry.propose, settings, body.uri, body.name)


@router.get("/{name}", responses=errors.responses(404))
async def get(request: Request, name: str, principal: JobsReader) -> dict[str, Any]:
    async with request.app.state.database.read() as connection:
        return registry.view(await registry.get(connection, principal.tenant, name))


@router.get("/{name}/profile", responses=errors.responses(404))
async def profile(request: Request, name: str, principal: JobsReader) -> dict[str, Any]:
    """Return the number of rows, the label rate, and each column's type, nulls, distinct values and range."""
    async with request.app.state.database.read() as connection:
        row = await registry.get(connection, principal.tenant, name)
    spec = DatasetSpec.model_validate(row["spec"])
    return await thread_pools.in_thread(registry.profile, request.app.state.settings.for_tenant(principal.tenant), spec)


@router.put("/{name}", responses=errors.responses(404, 409))
async def replace(request: Request, name: str, body: DatasetSpec, principal: JobsWriter) -> dict[str, Any]:
    """Replace a dataset's manifest; submitted jobs keep the old manifest, schedules use the new one."""
    database = request.app.state.database
    async with database.read() as connection:
        await registry.get(connection, principal.tenant, name)
    if body.name != name:
        message = f"it is '{body.name}', and the address names '{name}'"
        raise errors.invalid(FieldProblem("name", message, "give both the same name"))
    settings = request.app.state.settings.for_tenant(principal.tenant)
    await registry.in_check_thread(body, functools.partial(registry.check_files, settings, body))
    async with database.write() as connection:
        return await registry.replace(database, connection, body, principal.tenant)


@router.delete("/{name}", status_code=204, responses=errors.responses(404, 409))
async def delete(request: Request, name: str, principal: JobsWriter) -> None:
    async with request.app.state.database.write() as connection:
        await registry.delete(connection, principal.tenant, name)
