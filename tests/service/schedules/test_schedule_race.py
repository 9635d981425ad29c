"""An instant fires once and its job runs once: whichever processes race or are killed, whichever way clocks jump."""

from __future__ import annotations

import asyncio
import datetime
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.core.settings import Settings
from tests.service.racers import fire_killed_everywhere, replica
from tests.service.service_kit import BOTH, job_body
from tests.support import forked
from trainer.runs.run_process import terminate

pytestmark = [pytest.mark.anyio, BOTH, pytest.mark.slow, pytest.mark.process]

START = datetime.datetime(2026, 3, 1, 3, 0, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
PUBLISH = {"collection": "items", "feature": "item"}


async def create(app: FastAPI, client: httpx.AsyncClient, *names: str) -> None:
    """Schedules that fire every day at three, from START on, and catch up on all."""
    for name in names:
        job = job_body(publish=PUBLISH, labels={"team": "ads"})
        body = {"name": name, "cron": "0 3 * * *", "job": job, "catchup": "all", "overlap": "queue"}
        assert (await client.post("/v1/schedules", json=body)).status_code == 201
    async with app.state.database.write() as connection:
        await connection.execute(tables.schedule.update().values(next_fire_at=START))


async def test_killed_between_any_two_writes_a_firing_and_its_job_are_both_there_or_neither(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, database_url: str, tmp_path: Path
) -> None:
    await create(app, client, "daily")
    report = tmp_path / "report.json"
    process = forked.start(fire_killed_everywhere, database_url, START + DAY, str(report), log=tmp_path / "log.txt")
    await asyncio.to_thread(process.join, 300)
    assert process.exitcode == 0
    found = json.loads(report.read_text())
    assert [ended for ended, *_ in found] == [signal.SIGKILL] * (len(found) - 1) + [0]
    # Both days are one transaction; the last that is killed dies after its commit, or after that has told.
    states = [tuple(counts) for _, *counts in found]
    assert set(states) == {(0, 0, 0), (2, 2, 2)}
    assert states == sorted(states)
    assert states.count((0, 0, 0)) > 10, "steps within the transaction"


async def test_three_replicas_race_through_clock_jumps(
    app: FastAPI, client: httpx.AsyncClient, settings: Settings, dataset: str, database_url: str, tmp_path: Path
) -> None:
    """Firings, jobs, runs started and versions attempted are the same in number: each instant's one. One replica is
    killed between the start of a run and its record, and started again."""
    names, days = ("first", "second"), 4
    await create(app, client, *names)
    orders = ([0, 3, 1, 2, 3], [2, 0, 1, 0, 3], [1, 3, 0, 3, 2])
    instants = [[START + day * DAY + datetime.timedelta(minutes=1) for day in order] for order in orders]
    stop = tmp_path / "stop"
    homes = [tmp_path / f"replica{number}" for number in range(3)]

    def start(number: int, barrier: Any, dies: bool = False) -> Any:
        arguments = (database_url, homes[number], settings.data_roots[0], barrier, instants[number], stop, dies)
        return forked.start(replica, *arguments, log=tmp_path / f"replica{number}.txt")

    barrier = forked.barrier(3)
    replicas = [start(number, barrier, dies=number == 1) for number in range(3)]
    deaths = 0
    try:
        deadline = time.monotonic() + 300
        while await unfinished(app) or await count(app, tables.firing) < days * len(names):
            assert time.monotonic() < deadline
            for number, one in enumerate(replicas):
                if not one.is_alive():
                    assert (number, one.exitcode) == (1, -signal.SIGKILL)
                    deaths += 1
                    replicas[number] = start(number, None)
            await asyncio.sleep(0.1)
    finally:
        stop.touch()
        for one in replicas:
            await asyncio.to_thread(one.join, 300)
        for run in tmp_path.glob("replica*/runs/job_*"):
            terminate(run, 0)
    assert [one.exitcode for one in replicas] == [0, 0, 0]
    # Whether it comes to a second launch there is the race's affair.
    assert deaths <= 1
    async with app.state.database.read() as connection:
        firings = (await connection.execute(sa.select(tables.firing))).mappings().all()
        jobs = (await connection.execute(sa.select(tables.job))).mappings().all()
    runs = list(tmp_path.glob("replica*/runs/job_*"))
    started = [line for run in runs for line in (run / "log.txt").read_text().splitlines() if "begins" in line]
    events = [json.loads(line) for run in runs for line in (run / "events.jsonl").read_text().splitlines()]
    attempted = [one for one in events if one["type"] == "publication"]
    assert len(firings) == len(jobs) == len(runs) == len(started) == len(attempted) == days * len(names)
    assert {(one["schedule_id"], one["fire_at_utc"]) for one in firings} == {
        (schedule, START + day * DAY) for schedule in {one["schedule_id"] for one in firings} for day in range(days)
    }
    assert {one["job_id"] for one in firings} == {one["id"] for one in jobs} == {run.name for run in runs}
    assert {(one["state"], one["attempt"]) for one in jobs} == {("succeeded", 1)}


async def count(app: FastAPI, table: sa.Table) -> int:
    async with app.state.database.read() as connection:
        return int(await connection.scalar(sa.select(sa.func.count()).select_from(table)))


async def unfinished(app: FastAPI) -> int:
    job = tables.job.c
    left = sa.or_(job.state != "succeeded", job.released.is_(False))
    async with app.state.database.read() as connection:
        return int(await connection.scalar(sa.select(sa.func.count()).where(left)))
