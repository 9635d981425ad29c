"""Cancels at any moment of a run that forks away wherever it can: each job ends cancelled, and no process is left.

EVENKEEL_TEST_CANCELS says how many (500 is the figure of docs/guides/reliability.md); a run of the suite does some.
EVENKEEL_TEST_SEED: other moments.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.core.settings import Settings
from tests.service.service_kit import client_of, job_body, running, until
from trainer.runs import run_process as real
from trainer.runs.protocol import RUN_DIR_VARIABLE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUM_CANCELS = int(os.environ.get("EVENKEEL_TEST_CANCELS", "12"))
AT_ONCE = 6
# No limit of its own but time: each sleep is of this length, as no other on the machine: those left are known.
SLEEP = f"97.{os.getpid():08}"
STUBBORN = "trap '' TERM;"
NASTY = """
cd "$1"; {trap}
say() {{ printf '{{"time":"2026-01-01T00:00:00Z","attempt":1,"type":"state","state":"%s"}}\\n' "$1" >> events.jsonl; }}
sleep {sleep} &                                     # a child
setsid sleep {sleep} &                              # of another session
(sleep {sleep} & sleep 0.01 & ) &                   # whose parent dies
setsid sh -c "{trap} sleep {sleep} & sleep {sleep} & exit" &  # both
say starting
(for n in $(seq 100); do setsid sh -c "sleep {sleep} & sleep 0.05"; done) &  # and more for some seconds
say running
wait
"""


class NastyRuns:
    """An executor of shell scripts, quick to start, that leave processes behind in every way but one: none hides its
    environment, which only the run's own first process, that adopts orphans, could find (tests/trainer/test_launch)."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._children: list[subprocess.Popen[bytes]] = []

    def launch(self, run_dir: Path) -> int:
        script = NASTY.format(sleep=SLEEP, trap=self._rng.choice(["", STUBBORN]))
        environment = {**os.environ, RUN_DIR_VARIABLE: str(run_dir.resolve())}
        process = subprocess.Popen(
            ["sh", "-c", script, "sh", str(run_dir)], env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._children.append(process)
        real.write_process_file(run_dir, process.pid)
        return process.pid

    def is_alive(self, run_dir: Path) -> bool:
        for child in self._children:
            child.poll()
        return real.is_alive(run_dir)

    def terminate(self, run_dir: Path, grace_seconds: float) -> bool:
        return real.terminate(run_dir, grace_seconds)

    def end_all(self, runs: Path) -> None:
        for directory in runs.glob("job_*"):
            real.terminate(directory, 0)
        for child in self._children:
            child.wait()


def left_behind(runs: Path) -> list[psutil.Process]:
    """Every process that carries the name of a run directory, or sleeps as only these do."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(RUN_DIR_VARIABLE, "").startswith(str(runs))
            if (ours or SLEEP in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(1500)
async def test_cancels_at_random_moments_leave_no_orphan(settings: Settings, dataset_body: dict[str, Any]) -> None:
    seed = int(os.environ.get("EVENKEEL_TEST_SEED", "0"))
    print(f"seed {seed}")
    rng = random.Random(seed)
    runs = NastyRuns(rng)
    settings = dataclasses.replace(
        settings, role="all", max_runs=AT_ONCE, host_cores=AT_ONCE, host_memory_bytes=10**12,
        cancel_grace_seconds=0.05, follow_seconds=0.02,
    )  # fmt: skip
    states: dict[str, int] = {}
    try:
        async with running(settings, executor=runs) as app:
            async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
                await client.post("/v1/datasets", json=dataset_body)
                body = job_body("", retries=0)

                async def one() -> None:
                    job = (await client.post("/v1/jobs", json=body)).json()["id"]
                    least = rng.choice(("queued", "starting", "running"))
                    await until(lambda: _reached(client, job, least), 600)
                    await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.5))))
                    before = (await client.get(f"/v1/jobs/{job}")).json()["state"]
                    answer = await client.post(f"/v1/jobs/{job}/cancel")
                    assert answer.status_code == 202, answer.text
                    states[before] = states.get(before, 0) + 1
                    await until(lambda: _cancelled(client, job), 600)

                async def many(number: int) -> None:
                    for _ in range(number):
                        await one()

                await asyncio.gather(*(many(NUM_CANCELS // AT_ONCE + 1) for _ in range(AT_ONCE)))

                async def all_gone() -> bool:
                    return await asyncio.to_thread(left_behind, settings.runs) == []

                await until(all_gone)
        print(f"cancelled while: {states}")
        assert sum(states.values()) >= NUM_CANCELS
        assert len(states) > 1
    finally:
        runs.end_all(settings.runs)
        for process in left_behind(settings.runs):
            process.send_signal(signal.SIGKILL)


async def _reached(client: httpx.AsyncClient, job: str, least: str) -> bool:
    order = ("queued", "starting", "running")
    return order.index((await client.get(f"/v1/jobs/{job}")).json()["state"]) >= order.index(least)


async def _cancelled(client: httpx.AsyncClient, job: str) -> bool:
    shown = (await client.get(f"/v1/jobs/{job}")).json()
    assert shown["state"] in ("queued", "starting", "running", "cancelling", "cancelled"), shown
    return bool(shown["state"] == "cancelled")
