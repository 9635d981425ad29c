"""Datasets: registered, listed, profiled, proposed from a file."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service import datasets, errors, heavy, pages, tables
from service.auth import require
from service.pages import Page
from trainer.spec import DatasetSpec, Name

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])
READ = [Depends(require("jobs:read"))]
WRITE = [Depends(require("jobs:write"))]


class InferRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    uri: str = Field(min_length=1)
    name: Name | None = None


@router.post(
    "",
    status_code=201,
    dependencies=WRITE,
    responses=errors.also(200, "Registered before, just so.") | errors.responses(409),
)
async def register(request: Request, response: Response, body: DatasetSpec) -> dict[str, Any]:
    await asyncio.to_thread(datasets.check_files, request.app.state.settings, body)
    database = request.app.state.database
    async with database.write() as connection:
        shown, new = await datasets.register(database, connection, body)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/datasets/{body.name}"
    return shown


@router.get("", dependencies=READ)
async def list_datasets(
    request: Request, limit: Annotated[int, Query(ge=1, le=200)] = 50, cursor: str | None = None
) -> Page[dict[str, Any]]:
    table = tables.dataset
    async with request.app.state.database.read() as connection:
        rows, following = await pages.by_name(connection, sa.select(table), table.c.name, limit, cursor)
    return Page(items=[datasets.view(row) for row in rows], next_cursor=following)


@router.post("/infer", dependencies=WRITE)
async def propose(request: Request, body: InferRequest) -> dict[str, Any]:
    """A manifest proposed for a file under the data roots, to read and correct before it is registered."""
    return await heavy.in_thread(datasets.propose, request.app.state.settings, body.uri, body.name)


@router.get("/{name}", dependencies=READ, responses=errors.responses(404))
async def get(request: Request, name: str) -> dict[str, Any]:
    async with request.app.state.database.read() as connection:
        return datasets.view(await datasets.get(connection, name))


@router.get("/{name}/profile", dependencies=READ, responses=errors.responses(404))
async def profile(request: Request, name: str) -> dict[str, Any]:
    """Rows, label rate, and each column's type, nulls, distinct values and range."""
    async with request.app.state.database.read() as connection:
        row = await datasets.get(connection, name)
    spec = DatasetSpec.model_validate(row["spec"])
    return await heavy.in_thread(datasets.profile, request.app.state.settings, spec)


@router.delete("/{name}", status_code=204, dependencies=WRITE, responses=errors.responses(404, 409))
async def delete(request: Request, name: str) -> None:
    async with request.app.state.database.write() as connection:
        await datasets.delete(connection, name)
