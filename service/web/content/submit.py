"""The form for a new job: a minimal spec or a copy of another job's spec, to edit by fields or as text."""

from __future__ import annotations

import functools
import json
from typing import Any

import sqlalchemy as sa
import yaml
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import tables
from service.core.errors import invalid
from service.jobs import job_records
from service.web.request import DashboardRequest
from trainer.spec import JobSpec, yaml_documents
from trainer.spec.problems import FieldProblem
from trainer.spec.stored_specs import to_run

NUM_DATASETS = 200
MAX_CHARACTERS = 2**16
"""Longest text of YAML, and longest JSON made of one."""


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return the form's values; its spec is that of the job in the query's ``from``, or else :func:`first_spec`.

    Raises:
        Problem: 404 for a job that is not of the key's tenant.
    """
    source = request.asked("from")
    async with request.state.database.read() as connection:
        datasets = await _datasets(connection, request.principal.tenant)
        if source is None:
            spec = first_spec(datasets[0] if datasets else "DATASET")
        else:
            row = await job_records.get(connection, source, request.principal.sees)
            spec = without_defaults(to_run(row["spec"]))
    return {"spec": spec, "copied": source, "datasets": datasets, "schema": schema()}


def read_spec(text: str) -> str:
    """Return the spec that a text of YAML holds, as JSON; the parser is that of the command line.

    Raises:
        Problem: 422 for a text that is not one mapping of fields, or is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise invalid(FieldProblem("", f"The text has more than {MAX_CHARACTERS} characters", "submit it as JSON"))
    try:
        documents = [document for document in yaml_documents.load_all(text) if document is not None]
    except (yaml.YAMLError, RecursionError) as error:
        mark, what = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise invalid(FieldProblem("", f"The text is not YAML{where}: {what}")) from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        remedy = "register data sets with 'evenkeel datasets add FILE.yaml'"
        raise invalid(FieldProblem("", "A spec is one mapping of fields, that of the job", remedy))
    encoded = ""
    try:
        # Aliases can make a short text a document without end: piece by piece it is stopped in time.
        for piece in json.JSONEncoder(allow_nan=False, default=str).iterencode(documents[0]):
            encoded += piece
            if len(encoded) > MAX_CHARACTERS:
                raise ValueError(f"it has more than {MAX_CHARACTERS} characters as JSON")
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid(FieldProblem("", f"The spec cannot be written as JSON: {error}")) from None
    return encoded


def first_spec(dataset: str) -> dict[str, Any]:
    """Return a minimal spec on a dataset, for users to edit."""
    return {
        "name": "my-job",
        "dataset": {"name": dataset},
        "model": {"kind": "dnn"},
        "optimizer": {"kind": "adam_ar"},
        "epochs": 3,
    }


def without_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return a stored spec without the fields that equal their defaults; unchanged if this version cannot read it."""
    try:
        spec = JobSpec.model_validate(document)
        short = spec.model_dump(mode="json", exclude_defaults=True)
        if spec.model.defaults_with_items:
            # Without it, the dataset of the clone could choose another loss.
            short["model"]["loss"] = spec.model.loss
        # The default of ``decay`` depends on other fields, so a spec without it is tried.
        optimizer = {name: value for name, value in short.get("optimizer", {}).items() if name != "decay"}
        shorter = short | ({"optimizer": optimizer} if optimizer else {})
        return next(
            (candidate for candidate in (shorter, short) if JobSpec.model_validate(candidate) == spec), document
        )
    except ValidationError:
        return document


@functools.cache
def schema() -> dict[str, Any]:
    """Return the JSON schema of a job, without descriptive texts, from which the page builds its form."""
    return dict(_without_words(JobSpec.model_json_schema()))


def _without_words(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_words(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    # A field may be named "title" or "description"; its value is then a schema and not a string.
    return {
        name: _without_words(inner)
        for name, inner in part.items()
        if not (name in ("title", "description") and isinstance(inner, str))
    }


async def _datasets(connection: AsyncConnection, tenant: str) -> list[str]:
    dataset = tables.dataset.c
    query = sa.select(dataset.name).where(dataset.tenant == tenant).order_by(dataset.name).limit(NUM_DATASETS)
    return list(await connection.scalars(query))
