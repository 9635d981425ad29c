"""The database dies under a service that has a run under way: requests are told, the run goes on, and what happened
meanwhile is known once the database is back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.core import tables
from service.core.settings import Settings
from tests.service.private_postgres import PrivatePostgres, private_postgres
from tests.service.service_kit import client_of, job_body, running, until
from tests.service.small_run import SmallRuns

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def postgres() -> Iterator[PrivatePostgres]:
    with private_postgres() as server:
        yield server


async def test_a_crash_of_the_database_costs_nothing(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], postgres: PrivatePostgres
) -> None:
    settings = dataclasses.replace(settings, database_url=postgres.url, role="all")
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            publish = {"collection": "items", "feature": "item"}
            job = (await client.post("/v1/jobs", json=job_body("told", publish=publish))).json()["id"]
            schedule = {"name": "daily", "cron": "0 3 * * *", "job": job_body(), "catchup": "all", "overlap": "queue"}
            assert (await client.post("/v1/schedules", json=schedule)).status_code == 201

            async def progressed() -> Any:
                return (await client.get(f"/v1/jobs/{job}")).json()["progress"]

            await until(progressed)
            directory = settings.run_dir(job)
            postgres.crash()
            await refused(client, {**dataset_body, "name": "late"}, "127.0.0.1", str(postgres.port), "asyncpg")

            # The run trains on, and ends, with nobody to tell.
            size = (directory / "events.jsonl").stat().st_size

            async def grown() -> bool:
                return (directory / "events.jsonl").stat().st_size > size

            async def ended() -> bool:
                return (directory / "exit.json").exists()

            await until(grown)
            (directory / "finish").touch()
            await until(ended)
            await refused(client, {**dataset_body, "name": "late"}, "127.0.0.1", str(postgres.port), "asyncpg")
            postgres.start()

            async def known() -> Any:
                answer = await client.get(f"/v1/jobs/{job}")
                return answer.json() if answer.status_code == 200 and answer.json()["state"] == "succeeded" else None

            shown = await until(known)
            assert (shown["attempt"], shown["publication"]["status"]) == (1, "published")
            assert len(shown["metrics"]) == len({one["epoch"] for one in shown["metrics"]}) > 0
            assert shown["metrics"][-1]["epoch"] == shown["progress"]["epoch"], "every epoch until its end, each once"
            assert (await client.get("/readyz")).json()["status"] == "ok"
            # The scheduler is at work again as well.
            async with app.state.database.write() as connection:
                minute = tables.now().replace(second=0, microsecond=0)
                await connection.execute(tables.schedule.update().values(next_fire_at=minute, cron="* * * * *"))

            async def fired() -> Any:
                return (await client.get("/v1/schedules/daily/firings")).json()["items"]

            assert (await until(fired))[0]["outcome"] == "started"


async def refused(client: httpx.AsyncClient, dataset: dict[str, Any], *secrets: str) -> None:
    """Not ready, and nothing is taken; neither tells strangers where the database is."""
    ready = await client.get("/readyz")
    assert ready.status_code == 503
    assert [error["field"] for error in ready.json()["errors"]] == ["database"]
    for method, path, sent in (
        ("POST", "/v1/jobs", job_body()),
        ("POST", "/v1/datasets", dataset),
        ("PATCH", "/v1/schedules/daily", {"paused": True}),
        ("POST", "/v1/schedules/daily/trigger", {}),
    ):
        answer = await client.request(method, path, json=sent)
        assert answer.status_code == 503, (path, answer.text)
        assert answer.headers["retry-after"].isdigit()
        assert not any(secret in answer.text for secret in secrets), answer.text
    assert not any(secret in ready.text for secret in secrets), ready.text
    assert (await client.get("/healthz")).status_code == 200
