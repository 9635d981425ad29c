"""Runs that live and say nothing, or overstay: given up, their lease first, then ended, then tried again. And one that
wakes after that, while its successor is at work: whatever it says changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.core.settings import Settings
from tests.service.service_kit import client_of, running, submit, until, wait_for
from tests.service.small_run import SmallRuns
from tests.service.small_run_process import EVALUATION_SECONDS
from trainer.runs.directory import REVOKED, RUN_FILE
from trainer.runs.protocol import EXIT_FILE, PROCESS_FILE
from trainer.runs.run_process import processes

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    settings = dataclasses.replace(settings, role="all", **changes)
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            yield client


def main_pid(directory: Path) -> int:
    return int(json.loads((directory / PROCESS_FILE).read_text())["pid"])


async def progressed(client: httpx.AsyncClient, job: str, attempt: int = 1) -> None:
    async def look() -> bool:
        shown = (await client.get(f"/v1/jobs/{job}")).json()
        return shown["attempt"] == attempt and shown["state"] == "running" and bool(shown["progress"])

    await until(look)


async def test_a_stopped_run_is_given_up_and_tried_again(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    async with serving(settings, runs, dataset_body, silence_seconds=10.0) as client:
        job = (await submit(client, "told", retries=1))["id"]
        directory = settings.run_dir(job)
        await progressed(client, job)
        pid = main_pid(directory)
        os.kill(pid, signal.SIGSTOP)

        async def warned() -> Any:
            shown = (await client.get(f"/v1/jobs/{job}")).json()
            return "no sign of life" in (shown["reason"] or "") and shown

        said = await until(warned)
        assert "given up" in said["reason"]
        await progressed(client, job, attempt=2)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        (directory / "finish").touch()
        done = await wait_for(client, job, "succeeded", "failed")
    assert (done["state"], done["attempt"], done["error"], done["reason"]) == ("succeeded", 2, None, None)


async def test_ranks_that_take_no_step_are_given_up_though_their_driver_beats(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    """An evaluation that takes longer than a run may be silent is none of these: its driver beats meanwhile."""
    limit = EVALUATION_SECONDS / 2
    async with serving(
        settings, runs, dataset_body, silence_seconds=limit, max_runs=1, retry_backoff_seconds=1.0
    ) as client:
        job = (await submit(client, "stall", retries=1))["id"]
        waiting = (await submit(client, "succeed"))["id"]
        shown = await in_phase(client, job, "evaluation")
        assert shown["progress"]["step"] == 10

        async def given_up() -> Any:
            shown = (await client.get(f"/v1/jobs/{job}")).json()
            return shown["error"] is not None and shown

        began = time.monotonic()
        given = await until(given_up)
        assert time.monotonic() - began > EVALUATION_SECONDS, "not in its evaluation"
        assert "no step after step 10" in given["reason"]
        assert given["error"]["code"] == "run-stalled"
        done = await wait_for(client, job, "succeeded", "failed")
        assert (done["state"], done["attempt"]) == ("succeeded", 2)
        assert (await wait_for(client, waiting, "succeeded", "failed"))["state"] == "succeeded"


async def in_phase(client: httpx.AsyncClient, job: str, phase: str) -> dict[str, Any]:
    async def look() -> Any:
        shown = (await client.get(f"/v1/jobs/{job}")).json()
        return (shown["progress"] or {}).get("phase") == phase and shown

    shown: dict[str, Any] = await until(look)
    return shown


async def test_without_a_retry_left_it_fails_and_says_why(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    async with serving(settings, runs, dataset_body, silence_seconds=0.5) as client:
        job = (await submit(client, "hang", retries=0))["id"]
        done = await wait_for(client, job, "failed")
        assert done["error"]["code"] == "run-silent"
        assert "EVENKEEL_SILENCE_SECONDS" in done["error"]["remedy"]

        async def gone() -> bool:
            return processes(settings.run_dir(job)) == []

        await until(gone)
        assert json.loads((settings.run_dir(job) / RUN_FILE).read_text())["lease"] == REVOKED
        # By hand it can be tried again, under a new lease.
        assert (await client.post(f"/v1/jobs/{job}/retry")).status_code == 202
        again = await wait_for(client, job, "failed")
        assert again["attempt"] == 2


@pytest.mark.parametrize("stopped", [False, True])
async def test_the_time_limit_holds_for_runs_that_do_not_keep_it(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], stopped: bool
) -> None:
    """The run's own timer is not asked: a run may hang so that it never fires, or be stopped."""
    async with serving(settings, runs, dataset_body, cancel_grace_seconds=0.2) as client:
        job = (await submit(client, "told", retries=3, resources={"timeout_seconds": 1.5}))["id"]
        if stopped:
            process_file = settings.run_dir(job) / PROCESS_FILE

            async def launched() -> bool:
                return process_file.exists()

            # Not until it has progressed: on a busy machine its time may be over by then.
            await until(launched)
            os.kill(main_pid(settings.run_dir(job)), signal.SIGSTOP)
        done = await wait_for(client, job, "failed")
        assert done["error"]["code"] == "timeout"
        assert "1.5 seconds" in done["error"]["message"]
        assert done["attempt"] == 1, "it would take as long again"

        async def gone() -> bool:
            return processes(settings.run_dir(job)) == []

        await until(gone)


class OutOfReach(SmallRuns):
    """Like a host that the network has lost: what was to be ended there lives on, and nobody here knows."""

    lost: str | None = None
    unreachable = False

    def is_alive(self, run_dir: Path) -> bool:
        if self.lost is not None:
            pid = str(main_pid(run_dir)) if (run_dir / PROCESS_FILE).exists() else None
            if pid == self.lost:
                return False
        return super().is_alive(run_dir)

    def terminate(self, run_dir: Path, grace_seconds: float) -> bool:
        return True if self.unreachable else super().terminate(run_dir, grace_seconds)


async def test_one_that_wakes_while_its_successor_runs_changes_nothing(
    settings: Settings, dataset_body: dict[str, Any]
) -> None:
    runs = OutOfReach()
    try:
        # Long enough for the live ones on a busy machine: they say something ten times a second.
        async with serving(settings, runs, dataset_body, silence_seconds=10.0) as client:
            job = (await submit(client, "told", retries=1))["id"]
            directory = settings.run_dir(job)
            await progressed(client, job)
            old = main_pid(directory)
            runs.unreachable = True
            os.kill(old, signal.SIGSTOP)
            before = (await client.get(f"/v1/jobs/{job}")).json()
            assert before["attempt"] == 1

            async def given_up() -> bool:
                if (await client.get(f"/v1/jobs/{job}")).json()["state"] != "running":
                    runs.lost = str(old)
                    return True
                return False

            runs.lost = str(old) if await until(given_up) else None
            await progressed(client, job, attempt=2)
            os.kill(old, signal.SIGCONT)
            size = (directory / "events.jsonl").stat().st_size

            async def it_speaks() -> bool:
                lines = (directory / "events.jsonl").read_bytes()[size:].splitlines()
                return sum(b'"attempt":1' in line for line in lines) > 5

            await until(it_speaks)
            shown = (await client.get(f"/v1/jobs/{job}")).json()
            assert (shown["state"], shown["attempt"]) == ("running", 2)
            (directory / "finish").touch()  # both see it, and both say that they have succeeded
            done = await wait_for(client, job, "succeeded", "failed")
            assert (done["state"], done["attempt"]) == ("succeeded", 2)

            async def written() -> bool:
                return (directory / EXIT_FILE).exists()

            await until(written)  # a run says that it has succeeded before it writes its last file
            assert json.loads((directory / EXIT_FILE).read_text())["state"] == "succeeded"
            # Metrics are those of the second attempt: its own epochs, from the first on, without a gap.
            epochs = [metric["epoch"] for metric in done["metrics"]]
            assert epochs == list(range(1, len(epochs) + 1))
    finally:
        runs.end_all()
