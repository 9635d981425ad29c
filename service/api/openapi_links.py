"""Links in the OpenAPI document: which value of an answer names the object that another operation takes.

A list, a made object and each operation on one object are found by their paths: ``POST /v1/jobs`` answers with the
``id`` that every ``/v1/jobs/{job_id}...`` takes, ``GET /v1/jobs`` with those of its items.
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
    """Puts links beside every answer that names an object which operations take."""
    for path, field in NAMED_BY.items():
        operations = document["paths"].get(path, {})
        below = _below(document, path)
        for method, place in (("get", f"items/0/{field}"), ("post", field)):
            answers = operations.get(method, {}).get("responses", {})
            for status in {"get": ("200",), "post": ("201", "202")}[method]:
                if status in answers:
                    answers[status]["links"] = {
                        identifier: _link(identifier, path, last, place) for identifier, last in below.items()
                    }


def _below(document: dict[str, Any], path: str) -> dict[str, str]:
    """By operation id, the path parameter that names an item of this list; operations that need no other beside it and
    those of the list's own path."""
    found: dict[str, str] = {}
    for other, item in document["paths"].items():
        match = re.fullmatch(re.escape(path) + r"/{(\w+)}(/[\w/]+)?", other)
        if match is not None:
            found |= {operation["operationId"]: match[1] for operation in item.values()}
    return found


def _link(identifier: str, path: str, last: str, place: str) -> dict[str, Any]:
    parameters = {f"path.{name}": f"$request.path.{name}" for name in re.findall(r"{(\w+)}", path)}
    return {"operationId": identifier, "parameters": parameters | {f"path.{last}": f"$response.body#/{place}"}}
