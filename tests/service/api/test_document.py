"""What the OpenAPI document says of methods, credentials and values is what the service does."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio


@pytest.fixture
async def document(reading: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await reading.get("/openapi.json")).json())


async def test_a_method_that_is_not_there_is_answered_with_those_that_are(
    reading: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    for path, operations in document["paths"].items():
        method = next(one for one in ("patch", "put") if one not in operations)
        response = await reading.request(method.upper(), re.sub(r"\{.*?\}", "v000001", path))
        assert response.status_code == 405, path
        assert set(response.headers["allow"].split(", ")) == {method.upper() for method in operations}, path


@pytest.mark.parametrize(("method", "path"), [("get", "/metrics"), ("delete", "/session")])
async def test_what_answers_without_a_key_says_so(document: dict[str, Any], method: str, path: str) -> None:
    assert {} in document["paths"][path][method]["security"]


@pytest.mark.parametrize("until", ["0.5", "1700000000", "-1"])
async def test_a_number_is_no_time(reading: httpx.AsyncClient, until: str) -> None:
    response = await reading.get("/v1/audit", params={"until": until})
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == "until"
    assert "RFC 3339" in error["message"]
    assert (await reading.get("/v1/audit", params={"until": "2026-01-31T09:00:00+01:00"})).status_code == 200
    key = {"name": "short", "scopes": ["jobs:read"], "expires_at": 1.5}
    assert (await reading.post("/v1/keys", json=key)).json()["errors"][0]["field"] == "expires_at"


async def test_patches_say_no_defaults(document: dict[str, Any]) -> None:
    for name in ("SchedulePatch", "WebhookPatch"):
        fields = document["components"]["schemas"][name]["properties"]
        assert fields
        assert not any("default" in field for field in fields.values()), name


@pytest.mark.parametrize(
    ("name", "body", "fits"),
    [
        ("NeighborsRequest", {"id": 1}, True),
        ("NeighborsRequest", {"id": None, "vector": [1.0]}, True),
        ("NeighborsRequest", {"id": 1, "vector": [1.0]}, False),
        ("NeighborsRequest", {}, False),
        ("CanaryRequest", {"name": "genre", "uri": "labels.parquet"}, True),
        ("CanaryRequest", {"copy_from": "items"}, True),
        ("CanaryRequest", {"name": "genre", "uri": "labels.parquet", "copy_from": "items"}, False),
        ("CanaryRequest", {"name": "genre"}, False),
    ],
)
async def test_which_fields_go_together(document: dict[str, Any], name: str, body: dict[str, Any], fits: bool) -> None:
    import jsonschema

    schema = {**document["components"]["schemas"][name], "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits
