"""The OpenAPI document tells the truth: every answer that a route gives is one that it documents."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.core.settings import Settings
from tests.service import published
from tests.service.service_kit import job_body

pytestmark = pytest.mark.anyio


async def test_answers_are_documented(
    app: FastAPI, client: httpx.AsyncClient, settings: Settings, dataset: str, dataset_body: dict[str, Any]
) -> None:
    published.publish(settings)
    published.hold(settings)
    paths = app.openapi()["paths"]

    async def ask(method: str, route: str, expected: int, *names: str, **options: Any) -> httpx.Response:
        """``names`` fill the route's parameters."""
        path = re.sub(r"{\w+}", "{}", route).format(*names)
        answer = await client.request(method, path, **options)
        assert answer.status_code == expected, (method, path, answer.text)
        assert str(expected) in paths[route][method.lower()]["responses"], (method, path, expected)
        return answer

    job = (await ask("POST", "/v1/jobs", 202, json=job_body())).json()["id"]
    await ask("POST", "/v1/jobs", 200, json=job_body(), params={"dry_run": True})
    await ask("POST", "/v1/jobs/{job_id}/cancel", 202, job)
    await ask("POST", "/v1/jobs/{job_id}/cancel", 200, job)
    await ask("POST", "/v1/jobs/{job_id}/cancel", 404, "none")
    end = (await ask("GET", "/v1/jobs/{job_id}/events", 200, job)).text.rpartition("id: ")[2].split()[0]
    await ask("GET", "/v1/jobs/{job_id}/events", 204, job, headers={"Last-Event-ID": end})
    await ask("POST", "/v1/datasets", 200, json=dataset_body)
    await ask("POST", "/v1/datasets", 409, json={**dataset_body, "order": "date"})
    await ask("POST", "/v1/keys", 422, content=b"\xff", headers={"Content-Type": "application/json"})
    view = {"name": "raw", "collection": "items", "kind": "identity"}
    await ask("POST", "/v1/views", 201, json=view)
    await ask("POST", "/v1/views", 200, json=view)
    await ask("GET", "/v1/views", 404, params={"collection": "none"})
    await ask("GET", "/v1/views/{name}/layer", 409, "raw")
    tag = (await ask("GET", "/v1/views/{name}/layer", 200, "items_rff")).headers["ETag"]
    await ask("GET", "/v1/views/{name}/layer", 304, "items_rff", headers={"If-None-Match": tag})
    for route, name in (("/v1/views/{name}/vectors", "raw"), ("/v1/collections/{collection}/vectors", "items")):
        tag = (await ask("POST", route, 200, name, json={"ids": [10]})).headers["ETag"]
        await ask("POST", route, 304, name, json={"ids": [10]}, headers={"If-None-Match": tag})
        await ask("POST", route, 406, name, json={"ids": [10]}, headers={"Accept": "text/html"})
    snapshot = "/v1/collections/{collection}/versions/{version}/snapshot"
    tag = (await ask("GET", snapshot, 200, "items", "current")).headers["ETag"]
    await ask("GET", snapshot, 304, "items", "current", headers={"If-None-Match": tag})
    promote = "/v1/collections/{collection}/versions/{version}/promote"
    await ask("POST", promote, 409, "items", "v000002", json={"reason": "no"})
    await ask("POST", "/v1/jobs", 413, content=b"x" * (settings.max_body_bytes + 1))
    await ask("GET", "/v1/jobs", 421, headers={"Host": "elsewhere.example"})
