"""What a job shows of its preparation while it lasts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from service.core import tables
from service.core.settings import Settings
from service.jobs import job_records, run_events
from tests.service.service_kit import job_body
from trainer.data.prepare import progress
from trainer.data.prepare.preparation import prepare
from trainer.runs.events import EventWriter
from trainer.spec import parse_dataset, parse_job

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "ending",
    [("phase", {"name": "prepare", "seconds": 2.0}), ("state", {"state": "running"}), ("state", {"state": "failed"})],
    ids=["prepared", "running", "failed"],
)
async def test_a_job_says_how_far_its_preparation_is(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, ending: Any
) -> None:
    """The events are those of a real preparation."""
    monkeypatch.setattr(progress, "REPORT_SECONDS", -1.0)
    job = (await client.post("/v1/jobs", json=job_body())).json()
    directory = settings.run_dir(job["id"])
    directory.mkdir()

    async def applied() -> dict[str, Any]:
        async with app.state.database.write() as connection:
            row = await job_records.locked(connection, job["id"])
            await run_events.apply(connection, row, directory, False, 1.0)
        return dict((await client.get(f"/v1/jobs/{job['id']}")).json())

    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await job_records.change(connection, row, state="starting", attempt=1, lease="a", launched_at=tables.now())
        specs = parse_dataset(row["dataset_spec"]), parse_job(row["spec"])
    writer = EventWriter(directory, 1)
    seen: list[dict[str, Any]] = []

    def report(**figures: Any) -> None:
        writer.write("preparation", **figures)
        seen.append(figures)

    prepare(*specs, directory / "data", report=report)
    assert [figures["stage"] for figures in seen] == ["read", "write"]
    shown = await applied()
    assert shown["preparation"] == seen[-1]
    async with app.state.database.read() as connection:
        kept = sa.select(tables.job_event.c.data).where(tables.job_event.c.type == "preparation")
        assert [dict(one) for one in await connection.scalars(kept)] == seen[-1:], "the newest alone"
    kind, fields = ending
    writer.write(kind, **fields)
    writer.close()
    assert (await applied())["preparation"] is None
