"""Text that a database or an encoder cannot hold is the sender's mistake: never a 5xx, on either database."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.service.service_kit import BOTH, job_body

pytestmark = [pytest.mark.anyio, BOTH]

ODD = ["\x00", "a\x00b", "\ud800", "x" * 100_000, "𝔘𝔫𝔦", "'; DROP TABLE job; --", "../../etc", "\u202e", " ", "%", "-1"]


def post_body(value: Any) -> bytes:
    """JSON with escapes, as a client may send it: a lone surrogate too."""
    return json.dumps(value).encode("ascii")


async def test_in_paths_and_queries(client: httpx.AsyncClient, dataset: str) -> None:
    for text in ("%00", "a%00b", "%ff%fe", "%F0%9D%94%98", "x" * 5000, "%27%3B--", "%2e%2e", "%0d%0aX-A: b"):
        for path in (
            f"/v1/jobs/{text}", f"/v1/datasets/{text}", f"/v1/schedules/{text}", f"/v1/jobs?name={text}",
            f"/v1/jobs?label={text}", f"/v1/jobs?cursor={text}", f"/v1/schedules/{text}/firings", f"/{text}",
        ):  # fmt: skip
            response = await client.get(path)
            assert response.status_code < 500, (path, response.text)
        assert (await client.delete(f"/v1/keys/{text}")).status_code < 500
    for cursor in ("", "AAAA", "00", "7f", "6", "6A", "ff", "61\n"):
        refused = await client.get("/v1/jobs", params={"cursor": cursor})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "cursor"), cursor


@pytest.mark.slow
async def test_in_bodies(client: httpx.AsyncClient, dataset: str, dataset_body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    for odd in ODD:
        bodies = [
            ("/v1/jobs", job_body(labels={"team": odd})),
            ("/v1/jobs", {**job_body(), "name": odd}),
            ("/v1/jobs", {**job_body(), "dataset": {"name": odd}}),
            ("/v1/jobs", {**job_body(), odd: 1}),
            ("/v1/jobs", {**job_body(), "init_from": {"job": odd}}),
            ("/v1/jobs", {**job_body(), "init_from": {"collection": "items", "version": odd}}),
            ("/v1/datasets", {**dataset_body, "name": "other", "uri": odd}),
            ("/v1/datasets", {**dataset_body, "name": "other", "order": odd}),
            ("/v1/datasets/infer", {"uri": odd}),
            ("/v1/schedules", {"name": "daily", "cron": odd, "job": job_body()}),
            ("/v1/schedules", {"name": "daily", "cron": "* * * * *", "timezone": odd, "job": job_body()}),
            ("/v1/keys", {"name": odd, "scopes": ["admin"]}),
            ("/session", {"key": odd}),
        ]
        for path, body in bodies:
            response = await client.post(path, content=post_body(body), headers=headers)
            assert response.status_code < 500, (path, odd[:20], response.text)
        keyed = {**headers, "Authorization": "Bearer ek_00000000_" + odd[:10].encode("ascii", "ignore").decode()}
        assert (await client.get("/v1/jobs", headers=keyed)).status_code == 401
    for body in (b"", b"[]", b"null", b"1e999", b'{"name": NaN}', b"\xff\xfe", b"[" * 10_000, b'{"a":' * 5000):
        for path in ("/v1/jobs", "/v1/datasets", "/v1/schedules", "/v1/keys"):
            response = await client.post(path, content=body, headers=headers)
            assert 400 <= response.status_code < 500, (path, body[:20], response.text)
            assert response.headers["content-type"] == "application/problem+json"
