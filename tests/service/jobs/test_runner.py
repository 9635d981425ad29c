"""Jobs with a runner and real processes: run, fail, die, be cancelled, resume."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pyarrow.fs
import pytest

from service.core.database import Database
from service.core.settings import Settings
from service.jobs import run_events
from service.jobs.runner import Runner
from tests.contracts import store_servers
from tests.service import published
from tests.service.service_kit import BOTH, client_of, running, submit, until, wait_for
from tests.service.small_run import SmallRuns
from trainer.runs.run_process import processes

pytestmark = [pytest.mark.anyio, pytest.mark.process]

PUBLISH = {"collection": "items", "feature": "item"}


@BOTH
async def test_a_job_runs_to_its_end(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "succeed", epochs=3, publish=PUBLISH)
    done = await wait_for(service, job["id"], "succeeded")
    assert done["attempt"] == 1
    assert done["created_at"] <= done["started_at"] <= done["finished_at"]
    assert done["progress"] == {"epoch": 3, "epochs": 3, "step": 30, "examples": 100, "examples_per_second": 5.0}
    assert [(one["epoch"], one["split"]) for one in done["metrics"]] == [(n, "validation") for n in (1, 2, 3)]
    assert done["metrics"][0] == {"epoch": 1, "split": "validation", "auc": 0.71, "logloss": 0.5}
    publication = {"status": "published", "collection": "items", "version": "v000001", "reasons": [], "gate": []}
    assert done["publication"] == publication
    assert done["error"] is None
    run = json.loads((settings.run_dir(job["id"]) / "run.json").read_text())
    assert run["run_id"] == job["id"]
    assert run["attempt"] == 1
    assert run["job"] == job["spec"]
    assert run["dataset"]["uri"] == str(settings.data_roots[0] / "ratings.parquet")
    assert run["store_url"] == settings.store_url
    assert run["parent_version"] is None
    assert run["init_checkpoint"] is None
    assert run["lease"]["token"]
    assert settings.run_dir(job["id"]).stat().st_mode & 0o077 == 0


async def test_a_held_version_says_why(service: httpx.AsyncClient) -> None:
    job = await submit(service, "held", publish=PUBLISH)
    done = await wait_for(service, job["id"], "succeeded")
    assert done["publication"]["status"] == "held"
    assert done["publication"]["reasons"] == ["cosine .3 below .85"]


async def test_a_users_failure_is_not_retried(service: httpx.AsyncClient) -> None:
    job = await submit(service, "fail", retries=5)
    done = await wait_for(service, job["id"], "failed")
    assert done["attempt"] == 1
    assert done["error"] == {"code": "bad_data", "message": "row 7 is bad", "remedy": "correct it"}
    again = await service.post(f"/v1/jobs/{job['id']}/retry")
    assert again.json()["error"] is None
    done = await wait_for(service, job["id"], "failed")
    assert done["attempt"] == 2


async def test_an_infrastructure_failure_is_retried_so_often(service: httpx.AsyncClient) -> None:
    job = await submit(service, "retryable", retries=2)
    done = await wait_for(service, job["id"], "failed")
    assert done["attempt"] == 3
    assert done["error"]["code"] == "bad_data"


@BOTH
async def test_a_killed_run_goes_on_as_the_next_attempt(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "die", epochs=2)
    done = await wait_for(service, job["id"], "succeeded", "failed")
    assert (done["state"], done["attempt"], done["error"]) == ("succeeded", 2, None)
    assert [one["epoch"] for one in done["metrics"]] == [1, 2]
    log = (await service.get(f"/v1/jobs/{job['id']}/logs")).text
    assert log.count("begins") == 2
    run = json.loads((settings.run_dir(job["id"]) / "run.json").read_text())
    assert run["attempt"] == 2


async def test_a_run_that_always_dies_ends_failed(service: httpx.AsyncClient) -> None:
    job = await submit(service, "always_die", retries=1)
    done = await wait_for(service, job["id"], "failed")
    assert done["attempt"] == 2
    assert done["error"]["code"] == "run-died"
    assert done["error"]["message"].endswith("the last line of its log is: epoch 1")
    assert "killer" in done["error"]["remedy"]


def test_the_last_line_of_a_log_is_of_this_attempt(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert run_events._last_line(tmp_path, now) == ""
    (tmp_path / "log.txt").write_bytes(b"x" * 1000 + b"\nModuleNotFoundError: No module named 'trainer' \xff\x00\n \n")
    os.utime(tmp_path / "log.txt", (now.timestamp(),) * 2)
    assert run_events._last_line(tmp_path, now) == "ModuleNotFoundError: No module named 'trainer' \ufffd\ufffd"
    assert run_events._last_line(tmp_path, now + datetime.timedelta(seconds=1)) == "", "an earlier attempt's"


@BOTH
async def test_cancel_lets_the_run_stop_itself(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "hang")
    await wait_for(service, job["id"], "running")
    response = await service.post(f"/v1/jobs/{job['id']}/cancel")
    assert response.status_code == 202
    assert response.json()["state"] == "cancelling"
    assert (await service.post(f"/v1/jobs/{job['id']}/cancel")).status_code == 200
    await wait_for(service, job["id"], "cancelled")
    events = (settings.run_dir(job["id"]) / "events.jsonl").read_text()
    assert '"state":"cancelled"' in events, "the run had its grace"

    async def gone() -> bool:
        return processes(settings.run_dir(job["id"])) == []

    await until(gone)


@pytest.mark.parametrize("grace_seconds", [0.3])
async def test_cancel_kills_a_run_that_does_not_listen(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "stubborn")
    await wait_for(service, job["id"], "running")
    await service.post(f"/v1/jobs/{job['id']}/cancel")
    await wait_for(service, job["id"], "cancelled")
    assert processes(settings.run_dir(job["id"])) == []


async def test_the_end_of_the_service_does_not_wait_for_a_cancel(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, role="all", cancel_grace_seconds=200)
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            job = await submit(client, "stubborn")
            await wait_for(client, job["id"], "running")
            await client.post(f"/v1/jobs/{job['id']}/cancel")
            await asyncio.sleep(0.3)
        ended = time.monotonic()
    assert time.monotonic() - ended < 100
    settings = dataclasses.replace(settings, cancel_grace_seconds=0.2)
    async with (
        running(settings, executor=runs) as app,
        client_of(app, settings.admin_key_file.read_text().strip()) as client,
    ):
        await wait_for(client, job["id"], "cancelled")


async def test_a_cancelled_job_can_be_retried_and_deleted(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "hang")
    await wait_for(service, job["id"], "running")
    await service.post(f"/v1/jobs/{job['id']}/cancel")
    await wait_for(service, job["id"], "cancelled")
    assert (await service.post(f"/v1/jobs/{job['id']}/retry")).status_code == 202
    again = await wait_for(service, job["id"], "running")
    assert again["attempt"] == 2
    await service.post(f"/v1/jobs/{job['id']}/cancel")
    await wait_for(service, job["id"], "cancelled")

    async def deleted() -> bool:
        return (await service.delete(f"/v1/jobs/{job['id']}")).status_code == 204

    await until(deleted)
    assert not settings.run_dir(job["id"]).exists()


async def test_a_dataset_that_vanishes_while_queued_fails_the_job(service: httpx.AsyncClient, data_file: Path) -> None:
    first = await submit(service, "hang")
    await wait_for(service, first["id"], "running")
    second = await submit(service, "succeed")
    data_file.unlink()
    await service.post(f"/v1/jobs/{first['id']}/cancel")
    done = await wait_for(service, second["id"], "failed")
    assert done["error"]["code"] == "invalid-request"
    assert "no such file" in done["error"]["message"]
    assert done["error"]["remedy"] == "check the path"


@pytest.mark.slow
async def test_rows_whose_storage_is_away_when_a_job_starts_are_worth_another_try(
    settings: Settings, runs: SmallRuns, data_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    settings = dataclasses.replace(settings, role="all", object_roots=("s3://rows",))
    with contextlib.ExitStack() as server:
        address = server.enter_context(store_servers.s3_server("rows"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        bucket = pyarrow.fs.S3FileSystem(endpoint_override=address, scheme="http")
        with bucket.open_output_stream("rows/ratings.parquet") as file:
            file.write(data_file.read_bytes())
        async with running(settings, executor=runs) as app:
            async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
                features = {"user": {"type": "id"}, "item": {"type": "id"}}
                body = {"uri": "s3://rows/ratings.parquet", "features": features, "label": {"column": "rating"}}
                answer = await client.post("/v1/datasets", json={"name": "ratings", **body})
                assert answer.status_code == 201, answer.text
                first = await submit(client, "hang")
                await wait_for(client, first["id"], "running")
                second = await submit(client, "succeed", retries=1)
                server.close()
                await client.post(f"/v1/jobs/{first['id']}/cancel")
                done = await wait_for(client, second["id"], "failed")
                assert (done["attempt"], done["error"]["code"]) == (2, "data-unavailable")
                assert "did not return it" in done["error"]["message"]
                answer = await client.post("/v1/datasets", json={"name": "later", **body})
                assert (answer.status_code, answer.json()["type"]) == (503, "urn:evenkeel:data-unavailable")
                assert answer.headers["Retry-After"] == "10"
                assert answer.json()["errors"][0]["field"] == "uri"


async def test_init_from(service: httpx.AsyncClient, settings: Settings) -> None:
    source = await submit(service, "succeed")
    await wait_for(service, source["id"], "succeeded")
    without = await submit(service, "succeed", init_from={"job": source["id"]})
    done = await wait_for(service, without["id"], "failed")
    assert "checkpoints of job" in done["error"]["message"]
    checkpoints = settings.run_dir(source["id"]) / "checkpoints"
    checkpoints.mkdir()
    job = await submit(service, "succeed", init_from={"job": source["id"]})
    await wait_for(service, job["id"], "succeeded")
    run = json.loads((settings.run_dir(job["id"]) / "run.json").read_text())
    assert run["init_checkpoint"] == str(checkpoints)
    nowhere = await submit(service, "succeed", init_from={"collection": "nowhere"})
    done = await wait_for(service, nowhere["id"], "failed")
    assert "nowhere" in done["error"]["message"]
    assert "publish to the collection first" in done["error"]["remedy"]


async def test_a_retry_of_a_run_that_had_published_starts_from_the_same_parent(
    service: httpx.AsyncClient, settings: Settings
) -> None:
    """Killed between the switch and its last word: with its own version as parent it would publish a second one."""
    parent, _ = published.publish(settings)
    job = await submit(service, "fail", publish=PUBLISH)
    await wait_for(service, job["id"], "failed")
    directory = settings.run_dir(job["id"])
    assert json.loads((directory / "run.json").read_text())["parent_version"] == parent
    own, _ = published.publish(settings, job=job["id"])
    assert (await service.post(f"/v1/jobs/{job['id']}/retry")).status_code == 202
    await wait_for(service, job["id"], "failed")
    assert json.loads((directory / "run.json").read_text())["parent_version"] == parent
    # A job that had written nothing starts from what is served when it is tried again.
    other = await submit(service, "fail", publish=PUBLISH)
    await wait_for(service, other["id"], "failed")
    newest, _ = published.publish(settings, seed=3)
    assert newest != own
    assert (await service.post(f"/v1/jobs/{other['id']}/retry")).status_code == 202
    await wait_for(service, other["id"], "failed")
    run = json.loads((settings.run_dir(other["id"]) / "run.json").read_text())
    assert run["parent_version"] == newest


# --- restarts in one process -----------------------------------------------------------------------------------------


async def test_a_scheduler_process_runs_what_an_api_process_took(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    async with running(dataclasses.replace(settings, role="api"), executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            job = await submit(client, "succeed")
            await asyncio.sleep(0.3)
            assert (await client.get(f"/v1/jobs/{job['id']}")).json()["state"] == "queued"
            async with running(dataclasses.replace(settings, role="scheduler"), executor=runs):
                await wait_for(client, job["id"], "succeeded")


async def test_run_json_says_which_cluster_to_join(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, role="all", ray_address="ray-head:6379")
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            job = await submit(client, "succeed")
            await wait_for(client, job["id"], "succeeded")
    run = json.loads((settings.run_dir(job["id"]) / "run.json").read_text())
    assert run["ray_address"] == "ray-head:6379"


async def test_one_runner_per_home(settings: Settings, runs: SmallRuns) -> None:
    settings.runs.mkdir()
    database = Database(settings.database_url)
    one, two = (Runner(database, settings, None, runs) for _ in range(2))  # type: ignore[arg-type]
    assert one.acquire()
    assert one.acquire()
    assert not two.acquire()
    one.close()
    assert two.acquire()
    two.close()
    await database.stop()
