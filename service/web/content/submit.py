"""The form for a new job: a spec to edit, beginning from another job's, and what fields there are."""

from __future__ import annotations

import functools
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import tables
from service.core.errors import not_found
from service.jobs import job_records
from service.web.visit import Visit
from trainer.spec import JobSpec

NUM_DATASETS = 200


async def gather(visit: Visit) -> dict[str, Any]:
    """Return the spec that the form begins with: that of the job that ``from`` of the query names, or a first one.

    Raises:
        Problem: 404 for a job that is not the visitor's tenant's.
    """
    source = visit.asked("from")
    async with visit.state.database.read() as connection:
        datasets = await _datasets(connection, visit.principal.tenant)
        if source is None:
            spec = first_spec(datasets[0] if datasets else "DATASET")
        else:
            row = await job_records.get(connection, source)
            if visit.principal.sees not in (None, row["tenant"]):
                raise not_found("job", source)
            spec = without_defaults(row["spec"])
    return {"spec": spec, "copied": source, "datasets": datasets, "fields": fields()}


def first_spec(dataset: str) -> dict[str, Any]:
    """Return a spec to begin with."""
    return {
        "name": "my-job",
        "dataset": {"name": dataset},
        "model": {"kind": "dnn"},
        "optimizer": {"kind": "adam_ar"},
        "epochs": 3,
    }


def without_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return a stored spec without the fields that are as they would be anyway; whole if it is of another version."""
    try:
        spec = JobSpec.model_validate(document)
        short = spec.model_dump(mode="json", exclude_defaults=True)
        return short if JobSpec.model_validate(short) == spec else document
    except ValidationError:
        return document


@functools.cache
def fields() -> tuple[dict[str, Any], ...]:
    """Return the fields of a spec by its schema: name, type, default, and whether one must give it."""
    schema = JobSpec.model_json_schema()
    required = set(schema.get("required", ()))
    return tuple(
        {
            "name": name,
            "type": _type(part),
            "default": None if name in required else part.get("default"),
            "required": name in required,
        }
        for name, part in schema["properties"].items()
        if name != "spec_version"
    )


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a field as one reads it."""
    if "discriminator" in schema:
        return "kind: " + ", ".join(schema["discriminator"]["mapping"])
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            types = list(dict.fromkeys(_type(one) for one in schema[several]))
            return " | ".join(types[:4]) + (" | …" if len(types) > 4 else "")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", schema.get("const", "any")))


async def _datasets(connection: AsyncConnection, tenant: str) -> list[str]:
    dataset = tables.dataset.c
    query = sa.select(dataset.name).where(dataset.tenant == tenant).order_by(dataset.name).limit(NUM_DATASETS)
    return list(await connection.scalars(query))
