"""What becomes of jobs where the service, a run or an event is lost between any two steps."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from embeddings.durable_files import write_json
from service.core import tables
from service.core.database import Database
from service.core.settings import Settings
from service.jobs import job_records, run_events
from service.jobs.executors.base import ExecutorUnavailable
from service.jobs.runner import Runner
from tests.service.service_kit import client_of, running, submit, wait_for
from tests.service.small_run import SmallRuns
from trainer.runs.events import EventWriter
from trainer.runs.protocol import EXIT_FILE, PROCESS_FILE

pytestmark = [pytest.mark.anyio, pytest.mark.process]


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


async def test_a_job_of_a_host_whose_clock_is_ahead_does_not_begin_before_it_was_made(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings, runs: SmallRuns
) -> None:
    job = await submit(client, "succeed")
    made = tables.now() + datetime.timedelta(minutes=2)
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await job_records.change(connection, row, created_at=made)
    runner = Runner(app.state.database, settings, app.state.store, runs)
    assert runner.acquire()
    try:
        assert await runner.round(), "the job is taken"
    finally:
        runner.close()
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert datetime.datetime.fromisoformat(shown["started_at"]) == made


class NoRoom(SmallRuns):
    """Every run finds the disk full that its directory is on."""

    def launch(self, run_dir: Path, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_launch_that_finds_no_room_says_where(settings: Settings, dataset_body: dict[str, Any]) -> None:
    settings = dataclasses.replace(settings, role="all")
    async with running(settings, executor=NoRoom()) as app:
        key = settings.admin_key_file.read_text().strip()
        async with client_of(app, key) as client:
            await client.post("/v1/datasets", json=dataset_body)
            job = await submit(client, "told", retries=0)
            done = await wait_for(client, job["id"], "failed")
    assert done["error"]["code"] == "launch-failed"
    assert done["error"]["message"] == f"{settings.run_dir(job['id'])}: [Errno 28] No space left on device"


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
