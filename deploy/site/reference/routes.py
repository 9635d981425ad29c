"""The page of the REST interface, made from the service's OpenAPI document."""

from __future__ import annotations

import inspect
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

from deploy.site.reference.text import bullets, docstring, page, paragraph, plain
from service.app import create_app
from service.core.settings import Settings

Json = dict[str, Any]
_PUBLIC = "none"
_EVERYWHERE = {"Evenkeel-Tenant"}
_SAID_ONCE = {"401", "403", "413", "421", "422", "429", "503"}


def rest_page() -> str:
    """Return the page of all routes: scope, parameters, fields of the body and of the answer."""
    with tempfile.TemporaryDirectory() as home:
        app = create_app(Settings(home=Path(home)))
        document = app.openapi()
    intro = (
        "Each request sends a key as `Authorization: Bearer KEY`. Errors are `application/problem+json` (RFC "
        "9457): `type`, `title`, `status`, `detail` and `errors`, a list of `field`, `message`, `remedy`. Any route "
        "may answer 401 (no key), 403 (a key without the scope), 413 (too large), 421 (another host name), 422 (bad "
        "input), 429 (too many requests) or 503 (the database or another backend does not answer). Lists are `items` "
        "and `next_cursor`, "
        "which requests the next page if sent as `cursor`. With the header `Evenkeel-Tenant` an operator acts for a "
        "tenant. The service "
        "describes itself at `/openapi.json`, with schemas and examples."
    )
    found = sorted(_routes(app), key=lambda one: (one.tags[0], one.path_format, sorted(one.methods or ())))
    parts = [paragraph(intro)]
    for tag, routes in itertools.groupby(found, key=lambda one: str(one.tags[0])):
        parts.append(f"## {tag.capitalize()}")
        for route in routes:
            for method in sorted(route.methods or ()):
                parts += _route(method, route, document)
    return page("REST", "`service/api/routes`", *parts)


def _routes(app: Any) -> Iterator[APIRoute]:
    waiting = list(app.routes)
    while waiting:
        route = waiting.pop(0)
        if isinstance(route, APIRoute):
            if route.include_in_schema:
                yield route
        else:
            waiting += getattr(getattr(route, "original_router", None), "routes", ())


def _route(method: str, route: APIRoute, document: Json) -> list[str]:
    operation: Json = document["paths"][route.path_format][method.lower()]
    lines = [f"Scope: `{scope}`" for scope in _scopes(route.dependant)] or ["Scope: none"]
    lines += [
        _parameter(parameter)
        for parameter in operation.get("parameters", ())
        if parameter["name"] not in _EVERYWHERE and parameter["in"] != "path"
    ]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        lines.append(f"Body, `{kind}`: {_schema(content.get('schema', {}), document)}")
    answers = {status: answer for status, answer in operation["responses"].items() if status not in _SAID_ONCE}
    for status, answer in sorted(answers.items()):
        contents = [
            f"`{kind}`{': ' + shape if (shape := _schema(content.get('schema', {}), document)) else ''}"
            for kind, content in answer.get("content", {}).items()
            if kind != "application/problem+json"
        ]
        said = "" if answer["description"] == "Successful Response" else f" {plain(answer['description']).rstrip('.')}"
        lines.append(f"{status}{said}{': ' + '; '.join(contents) if contents else ''}")
    return [
        f"### {method} {route.path_format}",
        docstring(route.endpoint) or f"{operation['summary']}.",
        bullets(lines),
    ]


def _scopes(dependant: Any) -> list[str]:
    """Return the scopes that a route's dependencies require."""
    scopes = []
    for below in dependant.dependencies:
        found = inspect.getclosurevars(below.call).nonlocals.get("scope") if inspect.isfunction(below.call) else None
        scopes += [found] if isinstance(found, str) else []
        scopes += _scopes(below)
    return list(dict.fromkeys(scopes))


def _parameter(parameter: Json) -> str:
    schema = parameter["schema"]
    where = {"query": "Query", "header": "Header", "cookie": "Cookie"}[parameter["in"]]
    default = f"; default `{schema['default']}`" if schema.get("default") is not None else ""
    said = f": {plain(parameter['description']).rstrip('.')}" if parameter.get("description") else ""
    needed = "; required" if parameter["required"] else ""
    return f"{where} `{parameter['name']}` ({_kind(schema)}{default}{needed}){said}"


def _kind(schema: Json) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return " | ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


def _schema(schema: Json, document: Json) -> str:
    """Return the fields of a body as text; a link to their pages for a job and a dataset."""
    if "anyOf" in schema:
        return " or ".join(filter(None, (_schema(one, document) for one in schema["anyOf"])))
    if "$ref" not in schema:
        return _kind(schema) if schema.get("type") == "array" else ""
    name = schema["$ref"].rpartition("/")[2]
    elsewhere = {"JobSpec": "a [job](job.md)", "DatasetSpec": "a [dataset](dataset.md)"}
    if name in elsewhere:
        return elsewhere[name]
    fields = document["components"]["schemas"][name].get("properties", {})
    needed = document["components"]["schemas"][name].get("required", ())
    shown = ", ".join(f"`{field}`{'' if field in needed or not needed else '?'}" for field in fields)
    return f"`{name}`{' (' + shown + ')' if shown else ''}"
