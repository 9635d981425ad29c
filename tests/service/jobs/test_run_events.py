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


async def test_each_version_of_a_job_that_publishes_several_times_is_told_of_once(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end tells of the last one again, which the webhooks have had; how far behind it is stands in its progress."""
    told: list[Any] = []

    async def tell(connection: Any, tenant: str, event: str, data: dict[str, Any]) -> None:
        told.append((event, (data["publication"] or {}).get("version")))

    monkeypatch.setattr("service.webhooks.webhook_records.tell", tell)
    job = (await client.post("/v1/jobs", json=job_body())).json()
    directory = settings.run_dir(job["id"])
    directory.mkdir()
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await job_records.change(connection, row, state="running", attempt=1, lease="a", launched_at=tables.now())
    writer = EventWriter(directory, 1)
    lag = {"files": 3, "files_behind": 2, "seconds_behind": 7.5, "late_files": 1, "cores": 1.5, "memory_bytes": 2**30}
    writer.write("progress", epoch=1, epochs=1, step=9, loss=0.5, **lag)
    versions = [{"status": "published", "collection": "items", "version": f"v{step}", "step": step} for step in (9, 12)]
    for version in [*versions, versions[-1]]:
        writer.write("publication", **version, reasons=[], gate=[])
    writer.write("state", state="publishing")
    writer.write("state", state="succeeded")
    writer.close()
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await run_events.apply(connection, row, directory, True, 1.0)
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert shown["state"] == "succeeded"
    assert lag.items() <= shown["progress"].items()
    assert (shown["publication"]["version"], shown["publication"]["step"]) == ("v12", 12)
    assert told == [("publication.published", "v9"), ("publication.published", "v12"), ("job.succeeded", "v12")]
