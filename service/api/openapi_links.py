"""Links in the OpenAPI document: which response value identifies the object that another operation takes.

The operations that list, create and act on one kind of object are found by their paths: ``POST /v1/jobs`` returns the
``id`` that every ``/v1/jobs/{job_id}...`` takes, and ``GET /v1/jobs`` returns those of its items.
"""

from __future__ import annotations

import re
from typing import Any

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
"""By the path of a list, what names one of its items in the paths below."""


def add_to(document: dict[str, Any]) -> None:
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
    """Map operation ids to the path parameter that identifies an item of this list.

    Included are the operations that need no path parameters other than this one and those of the list's own path.
    """
    parameters: dict[str, str] = {}
    for other, item in document["paths"].items():
        match = re.fullmatch(re.escape(path) + r"/{(\w+)}(/[\w/]+)?", other)
        if match is not None:
            parameters |= {operation["operationId"]: match[1] for operation in item.values()}
    return parameters


def _link(identifier: str, path: str, last: str, pointer: str) -> dict[str, Any]:
    parameters = {f"path.{name}": f"$request.path.{name}" for name in re.findall(r"{(\w+)}", path)}
    return {"operationId": identifier, "parameters": parameters | {f"path.{last}": f"$response.body#/{pointer}"}}
