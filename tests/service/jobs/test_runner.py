"""Jobs with a runner and real processes: run, fail, die, be cancelled, resume."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pyarrow.fs
import pytest

from embeddings.durable_files import write_json
from service.core import tables
from service.core.database import Database
from service.core.settings import Settings
from service.jobs import job_records, output, run_events
from service.jobs.executors.base import ExecutorUnavailable
from service.jobs.runner import Runner
from tests.contracts import store_servers
from tests.service import published
from tests.service.service_kit import BOTH, client_of, job_body, running, until, wait_for
from tests.service.small_run import SmallRuns
from trainer.runs.events import EventWriter
from trainer.runs.protocol import EXIT_FILE, PROCESS_FILE
from trainer.runs.run_process import processes

pytestmark = [pytest.mark.anyio, pytest.mark.process]

PUBLISH = {"collection": "items", "feature": "item"}


async def submit(client: httpx.AsyncClient, behave: str, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/jobs", json=job_body(behave, **fields))
    assert response.status_code == 202, response.text
    return dict(response.json())


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
    assert "killer" in done["error"]["remedy"]


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
                assert "did not give it" in done["error"]["message"]
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


# --- what readers see ------------------------------------------------------------------------------------------------


def parse(stream: str) -> list[dict[str, Any]]:
    events = []
    for block in stream.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append({**fields, "data": json.loads(fields["data"])})
    return events


async def test_events_are_streamed_and_resumed(service: httpx.AsyncClient) -> None:
    job = await submit(service, "slow", epochs=4)
    path = f"/v1/jobs/{job['id']}/events"
    response = await service.get(path)  # ends when the job has
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse(response.text)
    states = [one["data"]["state"] for one in events if one["event"] == "state"]
    assert states == ["queued", "starting", "running", "succeeded"]
    assert [one["data"]["epoch"] for one in events if one["event"] == "metric"] == [1, 2, 3, 4]
    log = "".join(one["data"]["text"] for one in events if one["event"] == "log")
    assert log == (await service.get(f"/v1/jobs/{job['id']}/logs")).text
    # Whichever event a reader saw last, it gets exactly those after it.
    for index in range(len(events)):
        rest = await service.get(path, headers={"Last-Event-ID": events[index]["id"]})
        if index == len(events) - 1:
            assert rest.status_code == 204
            continue
        resumed = parse(rest.text)
        kept = [one for one in events[index + 1 :] if one["event"] in ("state", "metric")]
        assert [one for one in resumed if one["event"] in ("state", "metric")] == [
            {**one, "id": again["id"]}
            for one, again in zip(kept, [o for o in resumed if o["event"] in ("state", "metric")], strict=True)
        ]
        said = "".join(one["data"]["text"] for one in events[: index + 1] if one["event"] == "log")
        again = "".join(one["data"]["text"] for one in resumed if one["event"] == "log")
        assert said + again == log
    assert (await service.get(path, headers={"Last-Event-ID": "x"})).status_code == 422


async def test_logs_go_on_from_an_offset(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "succeed", epochs=2)
    await wait_for(service, job["id"], "succeeded")
    path = f"/v1/jobs/{job['id']}/logs"
    whole = await service.get(path)
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.text == "attempt 1 begins\nepoch 1\nepoch 2\n"
    part = await service.get(path, params={"offset": 8})
    assert part.text == whole.text[8:]
    assert part.headers["evenkeel-next-offset"] == str(len(whole.text))
    assert (await service.get(path, params={"offset": 10**9})).text == ""
    assert (await service.get(path, params={"offset": -1})).status_code == 422
    (settings.run_dir(job["id"]) / "log.txt").write_bytes(b"x" * (output.LOG_BYTES + 5))
    long = await service.get(path)
    assert len(long.content) == output.LOG_BYTES
    rest = await service.get(path, params={"offset": long.headers["evenkeel-next-offset"]})
    assert rest.content == b"x" * 5


async def test_a_long_log_is_streamed_in_whole_lines(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "succeed")
    await wait_for(service, job["id"], "succeeded")
    lines = [f"line {number} is ü".encode() for number in range(12_000)]
    text = b"\n".join([*lines, b"x" * (2 * output.STREAM_LOG_BYTES + 7), b"the last, unfinished"])
    (settings.run_dir(job["id"]) / "log.txt").write_bytes(text)
    events = parse((await service.get(f"/v1/jobs/{job['id']}/events")).text)
    parts = [one["data"]["text"] for one in events if one["event"] == "log"]
    assert "".join(parts).encode() == text
    assert len(parts) > 4
    assert all(part.endswith("\n") for part in parts[:2])


# --- restarts in one process -----------------------------------------------------------------------------------------


async def test_ending_the_service_leaves_the_run_and_the_next_one_finds_it(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, role="all")
    async with running(settings, executor=runs) as app:
        key = settings.admin_key_file.read_text().strip()
        async with client_of(app, key) as client:
            await client.post("/v1/datasets", json=dataset_body)
            job = await submit(client, "told", epochs=10)
            await wait_for(client, job["id"], "running")
    assert runs.is_alive(settings.run_dir(job["id"]))
    (settings.run_dir(job["id"]) / "finish").touch()
    async with running(settings, executor=runs) as app, client_of(app, key) as client:
        done = await wait_for(client, job["id"], "succeeded", "failed")
    assert (done["state"], done["attempt"]) == ("succeeded", 1)
    epochs = [one["epoch"] for one in done["metrics"]]
    assert epochs == list(range(1, len(epochs) + 1))
    assert len(runs.launched) == 1


async def test_a_run_that_died_while_nobody_looked_is_tried_again(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, role="all")
    async with running(settings, executor=runs) as app:
        key = settings.admin_key_file.read_text().strip()
        async with client_of(app, key) as client:
            await client.post("/v1/datasets", json=dataset_body)
            job = await submit(client, "hang", retries=0)
            await wait_for(client, job["id"], "running")
    process = json.loads((settings.run_dir(job["id"]) / PROCESS_FILE).read_text())
    os.kill(process["pid"], signal.SIGKILL)
    async with running(settings, executor=runs) as app, client_of(app, key) as client:
        done = await wait_for(client, job["id"], "failed")
    assert done["error"]["code"] == "run-died"


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


class OutOfReach(SmallRuns):
    """Nobody knows whether a run of its lives."""

    away = True

    def is_alive(self, run_dir: Path) -> bool:
        if self.away:
            raise ExecutorUnavailable("no answer")
        return super().is_alive(run_dir)


async def test_no_attempt_begins_while_the_one_before_it_may_live(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings
) -> None:
    """However much room there is."""
    settings = dataclasses.replace(settings, max_runs=4, host_cores=64.0, host_memory_bytes=2**50)
    job, runs = await submit(client, "succeed"), OutOfReach()
    runner = Runner(app.state.database, settings, app.state.store, runs)
    assert runner.acquire()
    try:
        async with app.state.database.write() as connection:
            row = await job_records.locked(connection, job["id"])
            before = {"attempt": 1, "lease": "a", "released": False, "home_id": runner.home_id}
            await job_records.change(connection, row, **before)
        for away, attempt in ((True, 1), (False, 2)):
            runs.away = away
            taken = await runner.round()
            assert taken is not away, "who is taken is started by another round at once"
            assert (await client.get(f"/v1/jobs/{job['id']}")).json()["attempt"] == attempt
    finally:
        runner.close()
        runs.end_all()


# --- every cut, again ------------------------------------------------------------------------------------------------


class Cut(Exception):
    """The process ends here."""


async def test_a_crash_between_any_two_steps_loses_and_doubles_nothing(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner is cut before and after each of its commits and its launch, one cut per job; whatever the cut, the job
    ends succeeded, in its first attempt, launched once, each metric once."""
    settings = dataclasses.replace(settings, role="api", follow_seconds=0.02)
    async with running(settings) as app:
        key = settings.admin_key_file.read_text().strip()
        state = app.state
        async with client_of(app, key) as client:
            await client.post("/v1/datasets", json=dataset_body)
            cut, finished = 0, False
            while not finished:
                job = await submit(client, "succeed", epochs=2)
                steps = 0

                def step(limit: int) -> None:
                    nonlocal steps
                    steps += 1
                    if steps == limit:
                        raise Cut

                class CutRuns:
                    def __init__(self, limit: int):
                        self.limit = limit

                    def launch(self, run_dir: Path) -> int:
                        step(self.limit)
                        pid = runs.launch(run_dir)
                        step(self.limit)
                        return pid

                    def is_alive(self, run_dir: Path) -> bool:
                        return runs.is_alive(run_dir)

                    def terminate(self, run_dir: Path, grace_seconds: float) -> bool:
                        return runs.terminate(run_dir, grace_seconds)

                class CutDatabase(Database):
                    limit = 0

                    def write(self):  # type: ignore[override]
                        step(self.limit)
                        return Database.write(self)

                cutting = CutDatabase(settings.database_url)
                cutting.limit = cut + 1
                before = len(runs.launched)
                runner = Runner(cutting, settings, state.store, CutRuns(cut + 1))
                assert runner.acquire()
                done: dict[str, Any] = {}
                was_cut = False
                deadline = time.monotonic() + 300
                while time.monotonic() < deadline:
                    try:
                        await runner.round()
                    except Cut:
                        was_cut = True
                        runner.close()
                        steps = -(10**9)
                        runner = Runner(state.database, settings, state.store, runs)
                        assert runner.acquire()
                    done = (await client.get(f"/v1/jobs/{job['id']}")).json()
                    async with state.database.read() as connection:
                        row = await job_records.get(connection, job["id"])
                    if done["state"] in ("succeeded", "failed") and row["released"]:
                        break
                    await asyncio.sleep(0.02)
                runner.close()
                await cutting.stop()
                assert (done["state"], done["attempt"]) == ("succeeded", 1), f"cut {cut}"
                assert [one["epoch"] for one in done["metrics"]] == [1, 2], f"cut {cut}"
                assert len(runs.launched) == before + 1, f"cut {cut}"
                finished = not was_cut
                cut += 1
            assert cut >= 5, "claim, launch (two sides), its commit, events, release"


async def test_events_of_an_attempt_that_was_given_up_change_nothing(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings
) -> None:
    job = await submit(client, "succeed")
    directory = settings.run_dir(job["id"])
    directory.mkdir()
    late, live = EventWriter(directory, 1), EventWriter(directory, 2)
    live.write("metric", split="validation")  # no epoch: passed over, and nothing after it is lost
    live.write("progress", epoch=1, epochs=2, step=5, examples=1, examples_per_second=1.0)
    late.write("progress", epoch=9, epochs=9, step=9, examples=9, examples_per_second=9.0)
    late.write("state", state="succeeded")
    late.write("publication", status="published", collection="items", version="v000009", reasons=[])
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        started = {"attempt": 2, "lease": "a", "launched_at": tables.now()}
        await job_records.change(connection, row, state="running", released=True, **started)
        assert not await run_events.apply(connection, row, directory, True, 1.0)
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert shown["state"] == "running"
    assert shown["progress"]["epoch"] == 1
    assert shown["publication"] is None
    late.close()
    live.close()


async def test_events_after_the_lease_was_taken_away_change_nothing(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings
) -> None:
    """Given up and waiting for the next attempt: the number is still that of the one which speaks."""
    job = await submit(client, "succeed")
    directory = settings.run_dir(job["id"])
    directory.mkdir()
    late = EventWriter(directory, 1)
    late.write("metric", split="validation", epoch=1, auc=0.9)
    late.write("progress", epoch=9, epochs=9, step=9, examples=9, examples_per_second=9.0)
    late.write("publication", status="published", collection="items", version="v000009", reasons=[])
    late.write("state", state="succeeded")
    late.close()
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await job_records.change(connection, row, attempt=1, lease=None, launched_at=tables.now())
        assert not await run_events.apply(connection, row, directory, True, 1.0)
        assert row["events_offset"] == run_events.size(directory), "they are passed over, not kept for later"
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert shown["state"] == "queued"
    assert (shown["progress"], shown["publication"], shown["metrics"]) == (None, None, [])


async def test_an_error_whose_event_was_lost_is_taken_from_the_exit_file(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings
) -> None:
    job = await submit(client, "succeed", retries=0)
    directory = settings.run_dir(job["id"])
    directory.mkdir()
    writer = EventWriter(directory, 1)
    writer.write("state", state="failed")
    writer.close()
    error = {"code": "disk_full", "message": "no space", "remedy": "free some"}
    write_json(directory / EXIT_FILE, {"attempt": 1, "state": "failed", "retryable": True, "error": error})
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        started = {"attempt": 1, "lease": "a", "launched_at": tables.now()}
        await job_records.change(connection, row, state="running", released=True, **started)
        await run_events.apply(connection, row, directory, True, 1.0)
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert (shown["state"], shown["error"]) == ("failed", error)


async def test_what_ranks_wrote_after_their_driver_died_is_kept(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings, runs: SmallRuns
) -> None:
    job = await submit(client, "succeed")
    settings = dataclasses.replace(settings, retry_backoff_seconds=600)  # so that it is not due while this test looks
    runner = Runner(app.state.database, settings, app.state.store, runs)
    assert runner.acquire()
    directory = settings.run_dir(job["id"])
    directory.mkdir()
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        later = tables.now() + datetime.timedelta(seconds=600)
        values = {
            "attempt": 1,
            "lease": "a",
            "released": False,
            "home_id": runner.home_id,
            "not_before": later,
            "failures": 1,
        }
        await job_records.change(connection, row, **values)
    orphan = EventWriter(directory, 1)
    orphan.write("metric", epoch=7, split="validation", auc=0.8)
    orphan.write("state", state="succeeded")
    orphan.close()
    await runner.round()
    runner.close()
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert [one["epoch"] for one in shown["metrics"]] == [7]
    assert shown["state"] == "queued"
