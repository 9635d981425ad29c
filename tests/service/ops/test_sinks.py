"""The service keeps sinks up to date, shows how far behind they are, and lets jobs name only the operator's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from embeddings.sinks.follow import attach
from service.core.settings import Settings
from tests.service import published
from tests.service.published import store_at
from tests.service.service_kit import client_of, job_body, running, until
from tests.service.small_run import SmallRuns
from tests.support import sinks
from tests.support.sinks import OfLanceDB

pytestmark = pytest.mark.anyio


@pytest.fixture
def lance(tmp_path: Path) -> Any:
    with sinks.readable("lancedb", tmp_path) as sink:
        yield sink


@pytest.fixture
def with_sinks(settings: Settings, lance: OfLanceDB, tmp_path: Path) -> Settings:
    file = tmp_path / "sinks.yaml"
    file.write_text(
        f"lake: {{url: '{lance.url}'}}\n"
        "away: {url: 'postgresql://me:secret@127.0.0.1:1/none'}\n"
        "theirs: {url: 'postgresql://127.0.0.1:1/none', tenant: shop}\n"
    )
    return dataclasses.replace(settings, role="all", sinks=str(file))


@pytest.mark.slow
async def test_a_publication_reaches_its_sinks_and_one_that_is_away_holds_nothing_up(
    with_sinks: Settings, lance: OfLanceDB, runs: SmallRuns
) -> None:
    published.publish(with_sinks)
    attach(store_at(with_sinks).collection("items"), ["lake", "away"])
    async with running(with_sinks, executor=runs) as app:
        async with client_of(app, with_sinks.admin_key_file.read_text().strip()) as client:

            async def settled(version: str) -> dict[str, Any]:
                """The collection's sinks, once the lake has the version and the other one has failed."""
                shown = (await client.get("/v1/collections/items")).json()["sinks"]
                away, lake = shown
                return {"away": away, "lake": lake} if lake["version"] == version and away["error"] else {}

            shown = await until(lambda: settled("v000001"))
            published.publish(with_sinks, seed=1)
            shown = await until(lambda: settled("v000002"))
            rows = lance.rows("items")
            assert rows is not None
            assert {row[3] for row in rows.values()} == {"v000002"}
            assert (shown["lake"]["rows"], shown["lake"]["lag_seconds"], shown["lake"]["error"]) == (50, 0.0, None)
            assert shown["away"]["version"] is None
            assert shown["away"]["lag_seconds"] > 0
            assert "127.0.0.1" not in shown["away"]["error"]
            metrics = (await client.get("/metrics")).text
            assert 'evenkeel_sink_lag_seconds{collection="items",sink="lake"} 0.0' in metrics
            assert 'evenkeel_sink_lag_seconds{collection="items",sink="away"} ' in metrics
            page = (await client.get("/dashboard/collections/items")).text
            assert ">lake<" in page
            body = {"ids": [10], "reason": "asked for it"}
            assert (await client.post("/v1/collections/items/erase", json=body)).status_code == 200

            async def erased() -> bool:
                return 10 not in (lance.rows("items") or {10: None})

            await until(erased)


async def test_jobs_may_name_only_the_sinks_of_their_tenant(
    with_sinks: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    async with running(with_sinks, executor=runs) as app:
        async with client_of(app, with_sinks.admin_key_file.read_text().strip()) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            publish = {"collection": "items", "feature": "item", "sinks": ["lake", "theirs"]}
            for dry_run in ("true", "false"):
                refused = await client.post("/v1/jobs", json=job_body(publish=publish), params={"dry_run": dry_run})
                assert refused.status_code == 422, refused.text
                (error,) = refused.json()["errors"]
                assert error["field"] == "publish.sinks"
                assert error["message"] == "there is no sink theirs"
                assert error["remedy"] == "name some of lake, away"
            taken = await client.post("/v1/jobs", json=job_body(publish={**publish, "sinks": ["lake"]}))
            assert taken.status_code == 202, taken.text
