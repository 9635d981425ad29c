"""Every operation reaches a success, is documented with it, and its examples are what the service takes and gives."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI

from service.api import openapi
from service.core.settings import Settings
from tests.service.api.walkthrough import Tour, Visit, documented, json_of, names_resolve, operations, seed

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("names_resolve")]
__all__ = ["names_resolve"]


@pytest.fixture
async def visits(client: httpx.AsyncClient, settings: Settings) -> list[Visit]:
    seed(settings)
    return await Tour(client, settings).run()


async def test_every_route_reaches_a_success(app: FastAPI, visits: list[Visit]) -> None:
    missing = {
        one for one in operations(app) - {visit.operation for visit in visits} if not one[1].startswith("/internal/")
    }
    assert not missing, f"tests/service/api/walkthrough.py has no step for {sorted(missing)}"
    known = {(method, path): operation["responses"] for method, path, operation in documented(app)}
    for visit in visits:
        if visit.operation in known:
            assert str(visit.answer.status_code) in known[visit.operation], visit.operation


# --- examples --------------------------------------------------------------------------------------------------------


def recorded(visits: list[Visit], settings: Settings) -> dict[str, Any]:
    """The first body and the first answer of each status, as ``service/api/examples.json`` holds them."""
    found: dict[str, Any] = {}
    for visit in visits:
        answer = json_of(visit.answer)
        if visit.body is None and answer is None:
            continue
        if visit.route.startswith(("/openapi.json", "/dashboard")):
            continue
        kept = found.setdefault(" ".join(visit.operation), {})
        if visit.body is not None:
            kept.setdefault("body", visit.body)
        if answer is not None:
            kept.setdefault("answers", {}).setdefault(str(visit.answer.status_code), _short(answer))
    text = json.dumps(found, indent=1, sort_keys=True).replace(str(settings.data_roots[0]), "/data")
    return dict(json.loads(re.sub(r"(ek_|whsec_)[\w+/=-]+", r"\1...", text)))


def _short(document: Any) -> Any:
    """Long lists by their first entries."""
    if isinstance(document, dict):
        return {name: _short(value) for name, value in document.items()}
    return [_short(value) for value in document[:2]] if isinstance(document, list) else document


def shape(document: Any) -> Any:
    """Names without values; what a user names (labels, columns, items) stays out of it."""
    if isinstance(document, dict):
        return {name: None if value in (None, [], {}) else True for name, value in document.items()}.keys()
    return type(document)


async def test_examples_are_what_the_service_takes_and_gives(visits: list[Visit], settings: Settings) -> None:
    found = recorded(visits, settings)
    if os.environ.get("EVENKEEL_WRITE_EXAMPLES"):
        openapi.FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    kept = json.loads(openapi.FILE.read_text("utf-8"))
    remedy = f"EVENKEEL_WRITE_EXAMPLES=1 .venv/bin/python -m pytest {__file__} writes them anew"
    assert kept.keys() == found.keys(), remedy
    for operation, example in found.items():
        assert kept[operation].get("body") == example.get("body"), (operation, remedy)
        answers = kept[operation].get("answers", {})
        assert answers.keys() == example.get("answers", {}).keys(), (operation, remedy)
        for status, answer in example.get("answers", {}).items():
            assert shape(answers[status]) == shape(answer), (operation, status, remedy)


def test_every_body_and_answer_has_an_example_that_fits_its_schema(app: FastAPI) -> None:
    document = app.openapi()
    assert document["openapi"].startswith("3.1")
    places = []
    for method, path, operation in documented(app):
        places.append((f"{method} {path}", operation.get("requestBody", {}).get("content", {})))
        for status, answer in operation["responses"].items():
            places.append((f"{method} {path} {status}", answer.get("content", {})))
    for place, content in places:
        for media_type in ("application/json", "application/problem+json"):
            if media_type in content and not place.startswith("GET /metrics"):
                assert "example" in content[media_type], f"{place}: no example"
                schema = {**content[media_type].get("schema", {}), "components": document["components"]}
                jsonschema.Draft202012Validator(schema).validate(content[media_type]["example"])


def test_every_operation_says_what_it_does(app: FastAPI) -> None:
    for method, path, operation in documented(app):
        assert operation.get("summary"), (method, path)
        assert operation.get("operationId"), (method, path)
