"""A tenant has at most so many jobs that wait or run, however many it sends at once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from service.core.settings import Settings
from service.core.tenants import HEADER
from tests.service.service_kit import BOTH, client_of, job_body, running

pytestmark = pytest.mark.anyio


@BOTH
async def test_no_tenant_fills_the_queue(settings: Settings, dataset_body: dict[str, Any]) -> None:
    roots = (("ads", settings.data_roots[0]),)
    settings = dataclasses.replace(settings, tenant_max_jobs=2, tenant_data_roots=roots)
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        for headers in ({}, {HEADER: "ads"}):
            assert (await client.post("/v1/datasets", json=dataset_body, headers=headers)).status_code == 201
        sent = [client.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": str(n)}) for n in range(5)]
        answers = await asyncio.gather(*sent)
        assert sorted(one.status_code for one in answers) == [202, 202, 409, 409, 409]
        refused = next(number for number, one in enumerate(answers) if one.status_code == 409)
        assert answers[refused].json()["type"] == "urn:evenkeel:too-many-jobs"
        assert "EVENKEEL_TENANT_MAX_JOBS" in answers[refused].json()["detail"]
        assert (await client.post("/v1/jobs", json=job_body(), headers={HEADER: "ads"})).status_code == 202
        first = next(one.json()["id"] for one in answers if one.status_code == 202)
        assert (await client.post(f"/v1/jobs/{first}/cancel")).json()["state"] == "cancelled"
        again = await client.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": str(refused)})
        assert again.status_code == 202, "the refused request has not kept its key"
        retried = await client.post(f"/v1/jobs/{first}/retry")
        assert (retried.status_code, retried.json()["type"]) == (409, "urn:evenkeel:too-many-jobs")
        assert (await client.get(f"/v1/jobs/{first}")).json()["state"] == "cancelled"
        assert len((await client.get("/v1/jobs", headers={HEADER: "default"})).json()["items"]) == 3
        schedule = {"name": "daily", "cron": "0 3 1 1 *", "job": job_body(), "overlap": "queue"}
        assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
        triggered = await client.post("/v1/schedules/daily/trigger")
        assert (triggered.status_code, triggered.json()["type"]) == (409, "urn:evenkeel:too-many-jobs")
