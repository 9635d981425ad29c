"""Every operation of the service once, in an order in which each succeeds: what examples, coverage and the walk with a
foreign key are made from. A new route needs its step here; the tests that use the tour say so."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI

from embeddings.refresh.publish import Gate, RefreshRequest, publish_candidate
from embeddings.refresh.publish import Settings as Stage
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
from service.core.settings import Settings
from service.web import pages
from tests.service import published
from tests.service.service_kit import job_body
from tests.support.query_towers import tower_of

NUM_ITEMS, DIM = 300, 8
WEBHOOK_HOST = "hooks.example.com"
JOB = job_body(model={"kind": "two_tower", "embedding_dim": 16}, publish={"collection": "items", "feature": "item"})
SCHEDULE = {
    "name": "nightly",
    "cron": "0 3 * * *",
    "timezone": "Europe/Zurich",
    "job": {**JOB, "dataset": {"name": "ratings", "window": {"start": "{firing_date}", "days": 1}}},
}


Reached = dict[tuple[str, str], set[int]]
"""By method and path, the statuses that were answered."""


@dataclasses.dataclass
class Visit:
    """One request and its answer."""

    method: str
    route: str
    params: dict[str, str]
    query: dict[str, Any]
    body: Any
    answer: httpx.Response

    @property
    def operation(self) -> tuple[str, str]:
        return self.method, self.route


def operations(app: FastAPI) -> set[tuple[str, str]]:
    """Method and path of every route of the application, those included that the document leaves out, but for the page
    of unknown addresses, which never succeeds."""
    found = set()
    todo = list(app.routes)
    while todo:
        route = todo.pop()
        inner = getattr(route, "original_router", None)
        if inner is not None:
            todo.extend(inner.routes)
        else:
            found |= {(method, route.path) for method in route.methods - {"HEAD", "OPTIONS"}}  # type: ignore[attr-defined]
    return found - {("GET", pages.UNKNOWN.address)}


def documented(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and description of every operation in the document."""
    for path, item in app.openapi()["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def seed(settings: Settings, tenant: str = "default") -> None:
    """A collection ``items`` of two versions, files for a dataset and a canary."""
    settings = settings.for_tenant(tenant)
    root = settings.data_roots[0]
    root.mkdir(exist_ok=True)
    store = open_store(settings.store_url)
    base = np.repeat(2 * np.eye(3, DIM), NUM_ITEMS // 3, axis=0)
    base = base + np.random.default_rng(0).standard_normal((NUM_ITEMS, DIM))
    for number in (1, 2):
        noise = 0.05 * np.random.default_rng(number).standard_normal((NUM_ITEMS, DIM))
        items = ItemVectors(np.arange(NUM_ITEMS), (base + noise).astype(np.float32))
        publish_candidate(
            store,
            "items",
            RefreshRequest(
                items,
                Stage(ema=None, gate=Gate("report")),
                parent_version=store.collection("items").current(),
                model="bpr",
                users=published.users_of(
                    np.arange(1, 5), [1, 2], tower=tower_of({"country": (["de", "fr"], np.eye(2, published.DIM))})
                ),
            ),
        )
    labels = {"id": np.arange(NUM_ITEMS), "label": np.repeat(["a", "b", "c"], NUM_ITEMS // 3)}
    pq.write_table(pa.table(labels), root / "labels.parquet")
    ratings = {
        "user": [1, 1, 2, 2, 3, 3], "item": [1, 2, 3, 1, 2, 3], "rating": [5, 3, 4, 1, 5, 2],
        "date": ["2026-01-01"] * 3 + ["2026-01-02"] * 3,
    }  # fmt: skip
    pq.write_table(pa.table(ratings), root / "ratings.parquet")


@pytest.fixture
def names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the tour's webhook has a public address, with or without a network."""
    whole = socket.getaddrinfo

    def lookup(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host == WEBHOOK_HOST:
            address = str(ipaddress.ip_address("93.184.216.34"))
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]
        return whole(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


def json_of(answer: httpx.Response) -> Any:
    """The document that was sent; None for none."""
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    return answer.json() if is_json and answer.content else None


class Tour:
    """``await run()`` makes the visits; ``keep`` leaves out what deletes, so that the objects stay."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        settings: Settings,
        *,
        keep: bool = False,
        webhook_url: str = f"https://{WEBHOOK_HOST}/evenkeel",
    ):
        self.visits: list[Visit] = []
        self._client = client
        self._settings = settings
        self._keep = keep
        self._webhook_url = webhook_url

    async def visit(self, operation: str, *values: str, body: Any = None, **query: Any) -> Any:
        """``operation``: ``POST /v1/jobs/{job_id}/cancel``; ``values`` fill its parameters. Returns the JSON sent."""
        method, route = operation.split(" ")
        if self._keep and method == "DELETE":
            return None
        names = re.findall(r"{(\w+)}", route)
        params = dict(zip(names, values, strict=True))
        options = {} if body is None else {"json": body}
        answer = await self._client.request(method, route.format(**params), params=query, **options)
        assert answer.is_success, (operation, answer.status_code, answer.text)
        self.visits.append(Visit(method, route, params, query, body, answer))
        return json_of(answer)

    async def run(self) -> list[Visit]:
        await self._health()
        await self._datasets()
        await self._jobs()
        await self._schedules()
        await self._features()
        await self._keys()
        await self._webhooks()
        return self.visits

    async def doomed(self) -> list[Visit]:
        """Requests that would delete what a tour that keeps has left; not sent."""
        objects = {
            "/v1/datasets/{name}": ["ratings"],
            "/v1/schedules/{name}": ["nightly"],
            "/v1/views/{name}": ["items_small"],
            "/v1/collections/{collection}/canaries/{name}": ["items", "genre"],
        }
        for route, listing in (("/v1/jobs/{job_id}", "jobs"), ("/v1/keys/{key_id}", "keys")):
            objects[route] = [(await self._client.get(f"/v1/{listing}")).json()["items"][0]["id"]]
        webhooks = (await self._client.get("/v1/webhooks")).json()["items"]
        objects["/v1/webhooks/{webhook_id}"] = [webhooks[0]["id"]]
        answer = httpx.Response(204)
        found = [Visit("DELETE", "/session", {}, {}, None, answer)]
        for route, values in objects.items():
            params = dict(zip(re.findall(r"{(\w+)}", route), values, strict=True))
            found.append(Visit("DELETE", route, params, {}, None, answer))
        return found

    async def _health(self) -> None:
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/", "/static/dashboard.css"):
            answer = await self._client.get(path)
            if path == "/metrics" and answer.status_code == 403:
                continue  # a tenant's own key
            assert answer.is_success, (path, answer.text)
            route = "/static/{name}" if path.startswith("/static") else path
            params = {"name": "dashboard.css"} if path.startswith("/static") else {}
            self.visits.append(Visit("GET", route, params, {}, None, answer))
        await self._page("")

    async def _page(self, address: str, *values: str) -> None:
        """A page of the dashboard, and what its script asks for."""
        if address:
            await self.visit(f"GET /dashboard{address}", *values)
        await self.visit(f"GET /dashboard/content{address}", *values)

    async def _datasets(self) -> None:
        uri = str(self._settings.data_roots[0] / "ratings.parquet")
        await self.visit("POST /v1/datasets/infer", body={"uri": uri, "name": "ratings"})
        dataset = {
            "name": "ratings", "uri": uri, "features": {"user": {"type": "id"}, "item": {"type": "id"}},
            "label": {"rule": "rating >= 4"}, "partition": "date",
        }  # fmt: skip
        await self.visit("POST /v1/datasets", body=dataset)
        await self.visit("POST /v1/datasets", body={**dataset, "name": "spare"})
        await self.visit("GET /v1/datasets")
        await self.visit("GET /v1/datasets/{name}", "ratings")
        await self.visit("GET /v1/datasets/{name}/profile", "ratings")
        await self._page("/datasets")
        await self._page("/datasets/{dataset}", "ratings")
        await self.visit("GET /dashboard/parts/profile/{dataset}", "ratings")
        await self.visit("PUT /v1/datasets/{name}", "spare", body={**dataset, "name": "spare", "max_bad_rows": 0.01})
        await self.visit("DELETE /v1/datasets/{name}", "spare")

    async def _jobs(self) -> None:
        await self.visit("POST /v1/jobs", body=JOB, dry_run=True)
        job = (await self.visit("POST /v1/jobs", body=JOB))["id"]
        await self.visit("GET /v1/jobs")
        await self.visit("GET /v1/jobs/{job_id}", job)
        await self.visit("POST /v1/jobs/{job_id}/cancel", job)
        await self.visit("POST /v1/jobs/{job_id}/cancel", job)
        await self.visit("GET /v1/jobs/{job_id}/logs", job)
        await self.visit("GET /v1/jobs/{job_id}/events", job)
        await self.visit("GET /v1/jobs/{job_id}/report", job)
        await self._page("/jobs")
        await self._page("/jobs/{job_id}", job)
        await self._page("/compare")
        await self._page("/submit")
        await self.visit("POST /v1/jobs/{job_id}/retry", job)
        await self.visit("POST /v1/jobs/{job_id}/cancel", job)
        await self.visit("DELETE /v1/jobs/{job_id}", job)

    async def _schedules(self) -> None:
        await self.visit("POST /v1/schedules", body=SCHEDULE)
        await self.visit("GET /v1/schedules")
        await self.visit("GET /v1/schedules/{name}", "nightly")
        await self.visit("PATCH /v1/schedules/{name}", "nightly", body={"paused": True})
        await self.visit("POST /v1/schedules/{name}/trigger", "nightly", body={"firing_date": "2026-01-02"})
        await self.visit("GET /v1/schedules/{name}/firings", "nightly")
        await self._page("/schedules")
        await self._page("/schedules/{schedule}", "nightly")
        await self.visit("DELETE /v1/schedules/{name}", "nightly")

    async def _features(self) -> None:
        one = "/v1/collections/{collection}"
        await self.visit("GET /v1/collections")
        await self.visit(f"GET {one}", "items")
        await self.visit(f"GET {one}/versions", "items")
        await self.visit(f"GET {one}/versions/{{version}}", "items", "current")
        back = {"reason": "worse click rate since this morning", "if_current": "v000002"}
        await self.visit(f"POST {one}/versions/{{version}}/promote", "items", "v000001", body=back)
        await self.visit(f"GET {one}/versions/{{version}}/snapshot", "items", "v000001")
        await self.visit(f"POST {one}/vectors", "items", body={"ids": [1, 2, 99], "version": "current"})
        await self.visit(f"POST {one}/neighbors", "items", body={"id": 1, "k": 3})
        await self.visit(f"POST {one}/recommend", "items", body={"users": [1, 2, 99], "k": 3, "exclude_seen": True})
        await self.visit(f"POST {one}/recommend", "items", body={"features": [{"country": "de"}], "k": 3})
        await self.visit(f"GET {one}/versions/{{version}}/tower", "items", "v000001")
        await self._page("/collections")
        await self._page("/collections/{collection}", "items")
        await self.visit("GET /dashboard/parts/versions/{collection}", "items")
        await self.visit("GET /dashboard/parts/neighbors/{collection}", "items", wanted=1)
        await self.visit("GET /dashboard/parts/recommended/{collection}", "items", user=1)
        await self.visit("POST /dashboard/parts/spec", body={"name": "text"})
        labels = str(self._settings.data_roots[0] / "labels.parquet")
        await self.visit(f"POST {one}/canaries", "items", body={"name": "genre", "uri": labels})
        await self.visit(f"GET {one}/canaries", "items")
        await self.visit(f"DELETE {one}/canaries/{{name}}", "items", "genre")
        ids = {"ids": [5], "reason": "the seller has asked for it"}
        await self.visit(f"POST {one}/erase", "items", body=ids)
        await self.visit(f"POST {one}/readmit", "items", body=ids)
        await self.visit(f"GET {one}/erasures", "items")
        view = {"name": "items_small", "collection": "items", "kind": "rff", "dim": 32, "sigma": 0.5, "seed": 3}
        await self.visit("POST /v1/views", body=view, dry_run=True)
        await self.visit("POST /v1/views", body=view)
        await self.visit("GET /v1/views")
        await self.visit("GET /v1/views/{name}", "items_small")
        await self.visit("GET /v1/views/{name}/layer", "items_small")
        await self.visit("POST /v1/views/{name}/vectors", "items_small", body={"ids": [1, 2]})
        await self.visit("DELETE /v1/views/{name}", "items_small")

    async def _keys(self) -> None:
        body = {"name": "ranking", "scopes": ["features:read"], "expires_at": "2126-01-01T00:00:00Z"}
        made = await self.visit("POST /v1/keys", body=body)
        await self.visit("GET /v1/keys")
        await self.visit("POST /v1/keys/{key_id}/rotate", made["id"], body={"overlap_seconds": 3600})
        await self.visit("DELETE /v1/keys/{key_id}", made["id"])
        await self.visit("GET /v1/tenants")
        await self.visit("GET /v1/audit", limit=3)
        await self._page("/access")
        key = self._client.headers["Authorization"].split()[1]
        await self.visit("POST /session", body={"key": key})
        self._client.cookies.clear()
        await self.visit("DELETE /session")

    async def _webhooks(self) -> None:
        one = "/v1/webhooks/{webhook_id}"
        body = {"url": self._webhook_url, "events": ["job.failed", "publication.held"]}
        webhook = (await self.visit("POST /v1/webhooks", body=body))["id"]
        await self.visit("GET /v1/webhooks")
        await self.visit(f"GET {one}", webhook)
        await self.visit(f"PATCH {one}", webhook, body={"events": ["job.failed"]})
        delivery = (await self.visit(f"POST {one}/ping", webhook))["id"]
        await self.visit(f"GET {one}/deliveries", webhook)
        await self.visit(f"POST {one}/deliveries/{{delivery_id}}/retry", webhook, delivery)
        await self.visit(f"DELETE {one}", webhook)


def parameters(path: str, values: dict[str, str]) -> dict[str, str]:
    """Those of ``path``; ``values``: by name, those called ``name`` by the beginning of the path."""
    prefix = "/".join(path.split("/")[:3])
    return {name: values[prefix if name == "name" else name] for name in re.findall(r"{(\w+)}", path)}
