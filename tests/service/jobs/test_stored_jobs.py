"""A job that an earlier version took, with settings that were removed since, starts, and is copied into a new one."""

from __future__ import annotations

import html
import json

import httpx
import pytest
from fastapi import FastAPI

from service.core import tables
from service.jobs import job_records, resource_prediction, submission
from tests.service.service_kit import job_body
from trainer.runs.directory import read_run

pytestmark = pytest.mark.anyio

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
REMOVED = {"calibrate": "off", "calibrate_seconds": 60.0}


async def test_a_waiting_job_of_an_earlier_version_starts(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    job = (await client.post("/v1/jobs", json=job_body() | {"publish": PUBLISH})).json()
    spec = job["spec"] | {"publish": PUBLISH | {"gate": PUBLISH["gate"] | REMOVED}}  # type: ignore[operator]
    async with app.state.database.write() as connection:
        await connection.execute(tables.job.update().where(tables.job.c.id == job["id"]).values(spec=spec))
    async with app.state.database.read() as connection:
        row = await job_records.get(connection, job["id"])
    settings = app.state.settings
    assert resource_prediction.of_row(settings, row).counted is True
    submission.prepare_run(settings, app.state.store, {**row, "attempt": 1, "lease": "l"})
    publish = read_run(settings.run_dir(job["id"])).job.publish
    assert publish is not None
    assert publish.gate.mode == "report"
    # Who copies it gets a spec that is taken; the spec that was stored is refused.
    page = html.unescape((await client.get(f"/dashboard/submit?from={job['id']}")).text)
    assert '"mode": "report"' in page
    assert "calibrate" not in page
    refused = await client.post("/v1/jobs", json=spec)
    assert refused.status_code == 422
    fields = {error["field"] for error in refused.json()["errors"]}
    assert fields == {"publish.gate.calibrate", "publish.gate.calibrate_seconds"}, json.dumps(refused.json())
