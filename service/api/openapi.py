"""The OpenAPI document: FastAPI's own document, with links, examples and the schema of error responses added.

A link says which response value identifies the object that another operation takes. The operations that list, create
and act on one kind of object are found by their paths: ``POST /v1/jobs`` returns the ``id`` that every
``/v1/jobs/{job_id}...`` takes, and ``GET /v1/jobs`` returns the ``id`` of each job listed.

Examples are requests and responses recorded from the service. ``examples.json`` is written by
``EVENKEEL_WRITE_EXAMPLES=1 pytest tests/service/api/test_api_walkthrough.py``. Without the variable, that test checks
that real responses have the same shape as those in the file, ``{"POST /v1/jobs": {"body": ..., "answers": {"202":
...}}}``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.core.errors import MEDIA_TYPE, ProblemBody, example_of

FILE = Path(__file__).with_name("examples.json")
JSON = "application/json"
NAMED_BY = {
    "/v1/collections": "name",
    "/v1/collections/{collection}/versions": "version",
    "/v1/datasets": "name",
    "/v1/jobs": "id",
    "/v1/keys": "id",
    "/v1/schedules": "name",
    "/v1/views": "name",
    "/v1/webhooks": "id",
    "/v1/webhooks/{webhook_id}/deliveries": "id",
}
"""Map from the path of each list to the field that identifies an item in longer paths such as ``/v1/jobs/{job_id}``."""


def document_of(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's document with links, examples, and the problem schema that error responses refer to."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schema = ProblemBody.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(schema.pop("$defs", {}))
        schemas["ProblemBody"] = schema
        add_examples(document)
        add_links(document)
        app.openapi_schema = document
    return app.openapi_schema


def add_links(document: dict[str, Any]) -> None:
    """Add links to every response that identifies an object which other operations take."""
    for path, field in NAMED_BY.items():
        operations = document["paths"].get(path, {})
        below = _below(document, path)
        for method, pointer in (("get", f"items/0/{field}"), ("post", field)):
            answers = operations.get(method, {}).get("responses", {})
            for status in {"get": ("200",), "post": ("201", "202")}[method]:
                if status in answers:
                    answers[status]["links"] = {
                        identifier: _link(identifier, path, last, pointer) for identifier, last in below.items()
                    }


def _below(document: dict[str, Any], path: str) -> dict[str, str]:
    """Map the ids of operations on an item of the list at ``path`` to the path parameter that identifies the item."""
    parameters: dict[str, str] = {}
    for other, item in document["paths"].items():
        match = re.fullmatch(re.escape(path) + r"/{(\w+)}(/[\w/]+)?", other)
        if match is not None:
            parameters |= {operation["operationId"]: match[1] for operation in item.values()}
    return parameters


def _link(identifier: str, path: str, last: str, pointer: str) -> dict[str, Any]:
    parameters = {f"path.{name}": f"$request.path.{name}" for name in re.findall(r"{(\w+)}", path)}
    return {"operationId": identifier, "parameters": parameters | {f"path.{last}": f"$response.body#/{pointer}"}}


def add_examples(document: dict[str, Any]) -> None:
    """Add an example to every JSON request body and every JSON response."""
    recorded = json.loads(FILE.read_text("utf-8"))
    for path, item in document["paths"].items():
        for method, operation in item.items():
            example = recorded.get(f"{method.upper()} {path}", {})
            content = operation.get("requestBody", {}).get("content", {})
            if JSON in content and "body" in example:
                content[JSON]["example"] = example["body"]
            for status, answer in operation["responses"].items():
                content = answer.get("content", {})
                if JSON in content and status in example.get("answers", {}):
                    content[JSON]["example"] = example["answers"][status]
                if MEDIA_TYPE in content:
                    content[MEDIA_TYPE] = {**content[MEDIA_TYPE], "example": example_of(int(status))}
