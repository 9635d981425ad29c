"""Links in the OpenAPI document lead to operations that are there, with every parameter of their paths."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import FastAPI


def links_of(document: Any) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    """By operation, the links of its answers: operation id -> parameters."""
    return {
        (method.upper(), path): {
            link["operationId"]: link["parameters"]
            for answer in operation["responses"].values()
            for link in answer.get("links", {}).values()
        }
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def test_links_lead_somewhere_and_name_all_that_is_needed(app: FastAPI) -> None:
    document = app.openapi()
    operations = {one["operationId"]: path for path, item in document["paths"].items() for one in item.values()}
    links = links_of(document)
    for source, found in links.items():
        for identifier, parameters in found.items():
            wanted = {f"path.{name}" for name in re.findall(r"{(\w+)}", operations[identifier])}
            assert parameters.keys() == wanted, (source, identifier)
    led_to = {operations[identifier] for found in links.values() for identifier in found}
    below = {path for path in operations.values() if path.startswith("/v1/") and "{" in path}
    # Canaries are named by who adds them, in a body of their own.
    assert below - led_to == {"/v1/collections/{collection}/canaries/{name}"}


@pytest.mark.slow
def test_a_made_object_and_a_list_name_what_their_operations_take(app: FastAPI) -> None:
    links = links_of(app.openapi())
    made, listed = links["POST", "/v1/jobs"], links["GET", "/v1/jobs"]
    assert made.keys() == listed.keys()
    cancel = "cancel_v1_jobs__job_id__cancel_post"
    assert made[cancel] == {"path.job_id": "$response.body#/id"}
    assert listed[cancel] == {"path.job_id": "$response.body#/items/0/id"}
    versions = links["GET", "/v1/collections/{collection}/versions"]
    assert versions["get_version_v1_collections__collection__versions__version__get"] == {
        "path.collection": "$request.path.collection",
        "path.version": "$response.body#/items/0/version",
    }
