"""What belongs to a tenant is neither seen nor changed with a key of another one: every route is walked."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from service.core.tenants import HEADER
from service.datasets import registry
from service.jobs import job_records
from service.schedules import schedule_records
from tests.service.api.walkthrough import Tour, Visit, names_resolve, operations, seed
from tests.service.service_kit import BOTH, client_of, job_body, running, until
from tests.service.small_run import SmallRuns

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("names_resolve")]
__all__ = ["names_resolve"]
SCOPES = ["jobs:read", "jobs:write", "features:read", "features:write", "admin"]
ABSENT = "nothing-of-that-name"
# What a request is told of itself: the time, its id, numbers that go up.
CHANGING = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)|req_\w+|audit_\w+")


async def key_of(client: httpx.AsyncClient, tenant: str, scopes: list[str] | None = None) -> str:
    body = {"name": f"of-{tenant}", "scopes": scopes or SCOPES}
    answer = await client.post("/v1/keys", json=body, headers={HEADER: tenant})
    assert answer.status_code == 201, answer.text
    assert answer.json()["tenant"] == tenant
    return str(answer.json()["key"])


def told(answer: httpx.Response, params: dict[str, str]) -> tuple[int, str]:
    """Status and text of an answer, without the names that the request had and what changes by itself."""
    text = CHANGING.sub("", answer.text)
    for name in sorted((value for value in params.values()), key=len, reverse=True):
        text = text.replace(name, "")
    return answer.status_code, text


async def state(client: httpx.AsyncClient, visits: list[Visit]) -> dict[str, Any]:
    """What the owner sees of its objects."""
    found = {}
    for visit in visits:
        if visit.method == "GET" and visit.route.startswith("/v1/") and "audit" not in visit.route:
            answer = await client.get(visit.route.format(**visit.params), headers={HEADER: "default"})
            found[visit.route, *visit.params.values()] = (answer.status_code, CHANGING.sub("", answer.text))
    return found


@pytest.mark.slow
@BOTH
async def test_every_route_with_a_key_of_another_tenant(
    app: FastAPI, client: httpx.AsyncClient, settings: Settings
) -> None:
    """For each route: the owner's objects are answered for just as objects that do not exist, lists do not show them,
    and afterwards the owner finds everything as it was."""
    seed(settings)
    tour = Tour(client, settings, keep=True)
    visits = await tour.run()
    walked = {visit.operation: visit for visit in visits}
    doomed = await Tour(client, settings).doomed()
    walked |= {visit.operation: visit for visit in doomed}
    missing = {one for one in operations(app) - walked.keys() if not one[1].startswith("/internal/")}
    assert not missing, f"tests/service/api/walkthrough.py has no step for {sorted(missing)}"
    before = await state(client, visits)
    async with client_of(app, await key_of(client, "ads")) as other:
        # Lists first: of what is made on the way the other sees its own.
        for visit in sorted(walked.values(), key=lambda one: (one.method != "GET", bool(one.params))):
            options = {} if visit.body is None else {"json": visit.body}
            path = visit.route.format(**visit.params)
            answer = await other.request(visit.method, path, params=visit.query, **options)
            if visit.route.startswith(("/static", "/session")) or not visit.route.startswith("/v1/"):
                continue
            if not visit.params:
                assert answer.status_code < 500, (visit.operation, answer.text)
                if visit.method == "GET":
                    shown = [one for one in answer.json()["items"] if one.get("tenant", one.get("name")) != "ads"]
                    assert not shown, (visit.operation, shown)
                continue
            absent = dict.fromkeys(visit.params, ABSENT)
            absent |= {name: "v000009" for name in visit.params if name == "version"}
            expected = await other.request(visit.method, visit.route.format(**absent), params=visit.query, **options)
            assert told(answer, visit.params) == told(expected, absent), visit.operation
            assert answer.status_code == 404, (visit.operation, answer.status_code)
        for visit in walked.values():
            if visit.route == "/" or (visit.method == "GET" and visit.route.startswith("/dashboard")):
                page = await other.get(visit.route.format(**visit.params))
                assert page.status_code == (404 if visit.params else 200), visit.operation
                if not visit.params and not visit.route.endswith("/access"):  # the audit log has what was tried above
                    assert not re.search(r"nightly|items_rff|job_[0-9a-z]{19}", page.text), visit.operation
        assert (await other.get("/metrics")).status_code == 403
        named = await other.get("/v1/jobs", headers={HEADER: "default"})
        assert (named.status_code, named.json()["type"]) == (403, "urn:evenkeel:not-operator")
    assert await state(client, visits) == before


@pytest.mark.slow
async def test_names_are_a_tenants_own(app: FastAPI, client: httpx.AsyncClient, settings: Settings) -> None:
    """The same tour, with the same names, for two tenants side by side."""
    own = dataclasses.replace(settings, data_roots=(settings.data_roots[0].with_name("ads_data"),))
    app.state.settings = dataclasses.replace(settings, tenant_data_roots=(("ads", own.data_roots[0]),))
    seed(settings)
    seed(dataclasses.replace(app.state.settings), "ads")
    async with client_of(app, await key_of(client, "ads")) as other:
        await Tour(client, settings, keep=True).run()
        await Tour(other, own, keep=True).run()
        job = (await other.get("/v1/jobs", params={"name": "small"})).json()["items"][0]
        assert job["tenant"] == "ads"
        # An operator sees jobs and keys of all, and acts for whom it names.
        assert (await client.get(f"/v1/jobs/{job['id']}")).status_code == 200
        listed = (await client.get("/v1/jobs")).json()["items"]
        assert {one["tenant"] for one in listed} == {"default", "ads"}
        as_ads = (await client.get("/v1/jobs", headers={HEADER: "ads"})).json()["items"]
        assert {one["tenant"] for one in as_ads} == {"ads"}
        uri = (await client.get("/v1/datasets/ratings", headers={HEADER: "ads"})).json()["uri"]
        assert uri.startswith(str(own.data_roots[0]))
        # Files of the default tenant are not the other's.
        stolen = await other.post("/v1/datasets/infer", json={"uri": str(settings.data_roots[0] / "labels.parquet")})
        assert (stolen.status_code, "outside the data roots" in stolen.text) == (422, True)
        names = (await client.get("/v1/tenants")).json()["items"]
        assert [one["name"] for one in names] == ["ads", "default"]
        assert [one["name"] for one in (await other.get("/v1/tenants")).json()["items"]] == ["ads"]
        # An id of a job tells nothing, in a spec neither.
        theirs = next(one["id"] for one in listed if one["tenant"] == "default")
        warm = job_body(init_from={"job": theirs})
        refused = await other.post("/v1/jobs", json=warm)
        assert (refused.status_code, "there is no job" in refused.text) == (422, True)
        # What was done by the operator to another tenant's object stands in that one's audit log.
        await client.delete(f"/v1/jobs/{job['id']}")
        assert (await other.get("/v1/audit")).json()["items"][0]["action"] == "DELETE /v1/jobs/{job_id}"


@pytest.mark.process
async def test_a_run_is_given_its_tenants_store_and_files_alone(settings: Settings) -> None:
    """Through the whole service: the run of another tenant publishes into its own store."""
    runs = SmallRuns()
    mine = settings.data_roots[0].with_name("ads_data")
    settings = dataclasses.replace(settings, role="all", tenant_data_roots=(("ads", mine),))
    seed(settings)
    seed(settings, "ads")
    try:
        async with running(settings, executor=runs) as app, client_of(app, _admin(settings)) as client:
            async with client_of(app, await key_of(client, "ads")) as other:
                tour = Tour(other, dataclasses.replace(settings, data_roots=(mine,)), keep=True)
                await tour._datasets()
                job = (await other.post("/v1/jobs", json=job_body())).json()
                file = settings.run_dir(job["id"]) / "run.json"

                async def written() -> bool:
                    return file.exists()

                await until(written)
                document = file.read_text()
                assert str(settings.home / "store" / "namespaces" / "ads") in document
                assert str(mine) in document
                assert str(settings.data_roots[0]) + "/" not in document
    finally:
        runs.end_all()


def _admin(settings: Settings) -> str:
    return settings.admin_key_file.read_text().strip()


async def test_keys_of_a_tenant_are_known_without_the_database(
    app: FastAPI, client: httpx.AsyncClient, settings: Settings
) -> None:
    """A process that serves vectors takes the tenant from its file of keys."""
    seed(settings)
    settings_of_two = dataclasses.replace(settings, role="vectors")
    key = await key_of(client, "ads", ["features:read"])
    async with running(settings_of_two) as first:
        await first.state.authenticator.inform()
    away = dataclasses.replace(settings_of_two, database_url="postgresql+asyncpg://none@127.0.0.1:1/none")
    async with running(away) as serving, client_of(serving, key) as other:
        answer = await other.post("/v1/collections/items/vectors", json={"ids": [1]})
        assert answer.status_code == 404, answer.text
        assert (await other.get("/v1/collections")).json()["items"] == []
    async with running(away) as serving, client_of(serving, _admin(settings)) as operator:
        assert (await operator.post("/v1/collections/items/vectors", json={"ids": [1]})).status_code == 200
        as_ads = await operator.get("/v1/collections", headers={HEADER: "ads"})
        assert as_ads.json()["items"] == []


def test_what_takes_a_name_takes_a_tenant() -> None:
    """Functions that find an object by name cannot be called without saying whose."""
    for function in (
        registry.get,
        registry.delete,
        registry.register,
        schedule_records.get,
        schedule_records.create,
        job_records.check,
    ):
        assert "tenant" in function.__annotations__, function
    for table in (tables.dataset, tables.job, tables.schedule, tables.api_key, tables.audit):
        assert "tenant" in table.c
