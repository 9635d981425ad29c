"""What a job keeps of the events of its run."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.core import tables
from service.core.settings import Settings
from service.jobs import job_records, run_events
from tests.service.service_kit import job_body
from trainer.runs.events import EventWriter

pytestmark = pytest.mark.anyio


async def test_metrics_that_an_attempt_could_not_tell_are_told_by_the_next(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings
) -> None:
    job = (await client.post("/v1/jobs", json=job_body())).json()
    directory = settings.run_dir(job["id"])
    directory.mkdir()
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await job_records.change(connection, row, state="running", attempt=2, lease="a", launched_at=tables.now())
    writer = EventWriter(directory, 2)
    history = [{"epoch": epoch, "split": "train", "loss": 1.0 / epoch} for epoch in (1, 2, 3)]
    writer.write("metric", **history[0])
    writer.write("metric", **history[2] | {"loss": 0.25})
    writer.write("history", metrics=history)
    writer.write("metric", epoch=4, split="train", loss=0.125)
    writer.close()
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await run_events.apply(connection, row, directory, True, 1.0)
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert [(one["epoch"], one["loss"]) for one in shown["metrics"]] == [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.125)]
