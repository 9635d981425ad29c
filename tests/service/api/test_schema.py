"""The OpenAPI document against the service: generated requests, valid ones and others, with an admin key on objects
that are there. No 5xx, no status and no content that the document does not name; each route reaches a success and the
errors that every route has: nobody, a key without the scope, a name that is not there, a strange host, a body too
large, too many requests.

``EVENKEEL_SCHEMA_EXAMPLES`` (3) requests of each operation; 200 take some minutes. The table of what was reached is
printed, and written to the file that ``EVENKEEL_SCHEMA_TABLE`` names.
"""

from __future__ import annotations

import contextlib
import http.client
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from service.core.settings import Settings
from tests.service.api.walkthrough import Reached, Tour, Visit, parameters, seed
from tests.service.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ELSEWHERE = {
    "401": "test_auth", "403": "test_auth", "404": "test_documented", "413": "test_before_the_body", "421": "test_app",
    "429": "test_audit",
    "200": "test_documented", "204": "test_documented", "304": "test_documented", "406": "test_documented",
    "409": "test_documented", "422": "test_jobs", "503": "test_database_down", "507": "test_disk_full",
}  # fmt: skip
"""Of what is documented and not reached here: the file of tests/service that brings it about."""


@pytest.mark.long
@pytest.mark.process
async def test_the_document_and_the_service_agree(tmp_path: Path) -> None:
    from tests.service.api.generated_requests import explore  # schemathesis takes seconds to import

    options = {"EVENKEEL_TARGET_NETWORKS": "127.0.0.0/8"}
    with serving(tmp_path, "api", **options) as served:
        settings = Settings(home=served.home, data_roots=(served.data,))
        await anyio.to_thread.run_sync(seed, settings)
        headers = {"Authorization": f"Bearer {served.key}"}
        reached: Reached = defaultdict(set)
        async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as client:
            document = (await client.get("/openapi.json")).json()
            hook = "http://127.0.0.1:9/evenkeel"
            tour = Tour(client, settings, keep=True, webhook_url=hook)
            for visit in await tour.run():
                reached[visit.operation].add(visit.answer.status_code)
            doomed = await tour.doomed()
            poor = [
                (await client.post("/v1/keys", json={"name": "reader", "scopes": [scope]})).json()["key"]
                for scope in ("features:read", "jobs:read")
            ]
            values = await known_values(client)
        await anyio.to_thread.run_sync(probe, served.url, document, served.key, poor, values, reached)
        await anyio.to_thread.run_sync(explore, served.url, document, served.key, reached)
        await anyio.to_thread.run_sync(delete, served.url, served.key, doomed, reached)
    with serving(tmp_path, "api", **options, EVENKEEL_REQUESTS_PER_SECOND="0.001") as served:
        await anyio.to_thread.run_sync(exhaust, served.url, document, served.key, values, reached)
    table = table_of(document, reached)
    print(f"\n{table}")
    if os.environ.get("EVENKEEL_SCHEMA_TABLE"):
        path = Path(os.environ["EVENKEEL_SCHEMA_TABLE"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table, "utf-8")
    for (method, path), statuses in reached.items():
        operation = document["paths"].get(path, {}).get(method.lower())
        if operation is None or not path.startswith("/v1/"):
            continue
        assert {401, 403, 413, 421, 429} <= statuses, (method, path, statuses)
        if "{" in path:
            assert 404 in statuses, (method, path, statuses)
        assert any(status < 300 for status in statuses), (method, path, statuses)
    missing = {(method.upper(), path) for path, item in document["paths"].items() for method in item} - reached.keys()
    assert not missing, missing


async def known_values(client: httpx.AsyncClient) -> dict[str, str]:
    """Path parameters of objects that are there."""

    async def first(listing: str) -> str:
        return str((await client.get(f"/v1/{listing}")).json()["items"][0]["id"])

    webhook = await first("webhooks")
    return {
        "job_id": await first("jobs"),
        "key_id": await first("keys"),
        "webhook_id": webhook,
        "delivery_id": await first(f"webhooks/{webhook}/deliveries"),
        "collection": "items",
        "version": "current",
        "/v1/datasets": "ratings",
        "/v1/schedules": "nightly",
        "/v1/views": "items_rff",
        "/v1/collections": "genre",
    }


def probe(url: str, document: Any, key: str, poor: list[str], values: dict[str, str], reached: Reached) -> None:
    """What every route answers to nobody, to a key without the scope, and where there is no object of that name."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, item in document["paths"].items():
            for method, operation in item.items():
                content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                options = {"json": content["example"]} if "example" in content else {}

                for number, (sender, filled) in enumerate(senders(path, key, poor, values)):
                    if number and not path.startswith("/v1/"):
                        continue
                    sent = {"Authorization": f"Bearer {sender}"} if sender else {}
                    answer = client.request(method, path.format(**filled), headers=sent, **options)
                    told = (method, path, answer.status_code, answer.text[:500])
                    assert str(answer.status_code) in operation["responses"], told
                    if answer.status_code >= 400:
                        assert answer.headers["content-type"] == "application/problem+json", told
                    reached[method.upper(), path].add(answer.status_code)
                sent = {"Authorization": f"Bearer {key}", "Host": "rebound.example"}
                answer = client.request(method, path.format(**parameters(path, values)), headers=sent)
                assert answer.status_code == 421, (method, path, answer.text)
                told = too_large(url, method.upper(), path.format(**parameters(path, values)), key)
                assert told == 413, (method, path, told)
                reached[method.upper(), path] |= {421, told}


def too_large(url: str, method: str, path: str, key: str) -> int:
    """The answer to a request that says that a gigabyte follows, and sends none of it."""
    host, _, port = url.removeprefix("http://").partition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.putrequest(method, path)
        connection.putheader("Authorization", f"Bearer {key}")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(2**30))
        connection.endheaders()
        return connection.getresponse().status


def delete(url: str, key: str, doomed: list[Visit], reached: Reached) -> None:
    """What deletes, at last; the session is nobody's here."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        for visit in doomed:
            if "{job_id}" in visit.route:
                client.post(f"/v1/jobs/{visit.params['job_id']}/cancel")
            if "{key_id}" in visit.route:
                made = client.post("/v1/keys", json={"name": "doomed", "scopes": ["jobs:read"]}).json()
                visit.params["key_id"] = made["id"]
            if visit.route == "/v1/datasets/{name}":
                shown = client.get("/v1/datasets/ratings").json()
                spec = {name: shown[name] for name in ("uri", "features", "label")} | {"name": "unused"}
                assert client.post("/v1/datasets", json=spec).status_code == 201
                visit.params["name"] = "unused"
            answer = client.delete(visit.route.format(**visit.params))
            reached[visit.operation].add(answer.status_code)


def exhaust(url: str, document: Any, key: str, values: dict[str, str], reached: Reached) -> None:
    """A service that answers a key once."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        assert client.get("/v1/jobs").status_code == 200
        for path, item in document["paths"].items():
            for method in item if path.startswith("/v1/") else ():
                answer = client.request(method, path.format(**parameters(path, values)))
                assert (answer.status_code, "retry-after" in answer.headers) == (429, True), (method, path)
                reached[method.upper(), path].add(429)


def senders(
    path: str, key: str, poor: list[str], values: dict[str, str]
) -> Iterator[tuple[str | None, dict[str, str]]]:
    """Nobody, a key without the scope, and the admin's key with names that are not there."""
    there = parameters(path, values)
    yield None, there
    yield poor[path.startswith(("/v1/collections", "/v1/views"))], there
    if there:
        yield key, dict.fromkeys(there, "v000099")


def table_of(document: Any, reached: Reached) -> str:
    """Route by route: the statuses that were reached, and those that are documented and were not, with the tests that
    show them. Raises KeyError for one that none does."""
    lines = ["| operation | reached | documented, shown elsewhere |", "|---|---|---|"]
    shown = set()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            seen = reached[method.upper(), path]
            rest = [status for status in sorted(operation["responses"]) if int(status) not in seen]
            shown |= set(rest)
            lines.append(f"| {method.upper()} {path} | {' '.join(map(str, sorted(seen)))} | {' '.join(rest)} |")
    places = ", ".join(f"{status} in {ELSEWHERE[status]}.py" for status in sorted(shown))
    return "\n".join(lines) + f"\n\nElsewhere (tests/service): {places}.\n"
