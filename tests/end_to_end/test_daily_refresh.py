"""examples/daily_refresh.yaml through three simulated days: each firing trains on its own days from the version before,
and what it publishes stays put. Real training, of ranks on this host without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.app import create_app
from service.core import tables
from service.core.settings import Settings
from service.schedules import scheduler
from tests.service.forked_service import warm_pool_of_tests
from trainer.data.sources.click_log import ClickLog, generate
from trainer.runs import run_process, warm_pool
from trainer.spec import load_documents

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIRST = datetime.date(2026, 1, 8)
RUN_SECONDS = 600.0


async def until_ended(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        job = (await client.get(f"/v1/jobs/{job_id}")).json()
        if job["state"] in ("succeeded", "failed", "cancelled"):
            return dict(job)
        assert time.monotonic() < deadline, job
        await asyncio.sleep(0.2)


async def due_at(app: FastAPI, at: datetime.datetime) -> None:
    async with app.state.database.write() as connection:
        await connection.execute(tables.schedule.update().values(next_fire_at=at))


async def told(client: httpx.AsyncClient, job: dict[str, Any]) -> str:
    """Why a job failed, and the end of its log."""
    log = await client.get(f"/v1/jobs/{job['id']}/logs")
    return f"{job['error']}\n{log.text[-3000:]}"


async def three_days(tmp_path: Path) -> None:
    generate(ClickLog(num_rows=44_000, num_days=11), tmp_path / "clicklog")
    settings = Settings(home=tmp_path / "home", data_roots=(tmp_path,), role="all", schedule_seconds=3600)
    app = create_app(settings)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(app.router.lifespan_context(app))
        stack.callback(lambda: [run_process.terminate(run, 0) for run in settings.runs.glob("job_*")])
        key = settings.admin_key_file.read_text().strip()
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app),
                base_url="http://127.0.0.1:8080",
                headers={"Authorization": f"Bearer {key}"},
            )
        )
        dataset, first = load_documents(EXAMPLES / "clicklog_items.yaml")
        _, refresh = load_documents(EXAMPLES / "daily_refresh.yaml")
        assert dataset is not None
        assert first is not None
        assert refresh is not None
        here = dataset.model_copy(update={"uri": str(tmp_path / "clicklog")})
        (await client.post("/v1/datasets", json=here.model_dump(mode="json"))).raise_for_status()
        begun = (await client.post("/v1/jobs", json=first.model_dump(mode="json"))).raise_for_status().json()
        done = await until_ended(client, begun["id"])
        assert done["state"] == "succeeded", await told(client, done)
        assert done["publication"]["status"] == "published", done["publication"]

        schedule = {"name": "daily-refresh", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "catchup": "last"}
        schedule |= {"job": refresh.model_dump(mode="json")}
        (await client.post("/v1/schedules", json=schedule)).raise_for_status()
        before, trained = done["publication"]["version"], done["id"]
        for day in range(1, 4):
            date = FIRST + datetime.timedelta(days=day)
            at = datetime.datetime(date.year, date.month, date.day, 2, tzinfo=datetime.UTC)  # three in Berlin
            if day == 1:
                await due_at(app, at)
            assert await scheduler.fire_due(app.state.database, at - datetime.timedelta(minutes=1)) == 0
            assert await scheduler.fire_due(app.state.database, at + datetime.timedelta(seconds=1)) == 1
            # Come round to again, as by a service whose clock was set back: the same instant, no other job.
            await due_at(app, at)
            assert await scheduler.fire_due(app.state.database, at + datetime.timedelta(seconds=2)) == 0
            firing = (await client.get("/v1/schedules/daily-refresh/firings")).json()["items"][0]
            job = await until_ended(client, firing["job_id"])
            assert job["state"] == "succeeded", await told(client, job)
            assert job["publication"]["status"] == "published", job["publication"]
            assert job["spec"]["dataset"]["window"] == {"start": date.isoformat(), "days": 2}
            assert job["parent_version"] == before
            version = (await client.get("/v1/collections/items/versions/current")).json()
            assert (version["parent"], version["job"]) == (before, job["id"])
            assert version["alignment"] is not None
            assert version["gate"]
            assert all(check["verdict"] != "fail" for check in version["gate"])
            log = (await client.get(f"/v1/jobs/{job['id']}/logs")).text
            assert f"warm start from {settings.run_dir(trained)}" in log
            before, trained = version["version"], job["id"]
        firings = (await client.get("/v1/schedules/daily-refresh/firings")).json()["items"]
        assert [one["outcome"] for one in firings] == ["started"] * 3
        assert len((await client.get("/v1/jobs")).json()["items"]) == 1 + 3
        versions = (await client.get("/v1/collections/items/versions")).json()["items"]
        assert sorted(one["version"] for one in versions) == [f"v{number:06}" for number in range(1, 5)]


@pytest.mark.timeout(4 * RUN_SECONDS)
def test_three_days_of_the_daily_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_pool, "start_process", warm_pool_of_tests)
    asyncio.run(three_days(tmp_path))
