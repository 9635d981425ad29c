"""Jobs that begin with the workers that there is room for, and jobs whose machine asks their run to end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.durable_files import write_json
from service.core import tables
from service.core.settings import Settings
from service.jobs import admission, job_records, run_events
from service.jobs.admission import ResourceRequest
from service.jobs.executors.base import FreeResources
from tests.service.service_kit import client_of, job_body, running, until, wait_for
from tests.service.small_run import SmallRuns
from trainer.runs.protocol import EXIT_FILE, PROCESS_FILE
from trainer.sizing.memory import RUN_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.process]

GB = 10**9
ELASTIC = {"num_workers": 3, "min_workers": 1}
NEEDS = ResourceRequest(3, 6.0, 3 * GB + RUN_BYTES, 0, True, ((2, 3 * GB + RUN_BYTES), (1, 2 * GB + RUN_BYTES)))


def test_a_request_is_stored_and_read_with_what_fewer_workers_take() -> None:
    assert ResourceRequest.read(json.loads(json.dumps(NEEDS.document()))) == NEEDS
    assert [(one.workers, one.cores) for one in NEEDS.choices()] == [(3, 6.0), (2, 4.0), (1, 2.0)]
    assert NEEDS.taken(2).memory_bytes == 3 * GB + RUN_BYTES
    assert NEEDS.taken(None) == NEEDS
    rigid = NEEDS._replace(fewer=())
    assert "fewer" not in rigid.document()
    assert ResourceRequest.read(rigid.document()) == rigid


def test_on_a_cluster_as_many_begin_as_there_are_places_for() -> None:
    def refuse_on(nodes: list[FreeResources]) -> admission.Refuse:
        return lambda choice: admission.cluster_obstacle(choice, nodes, {}, 9)

    node = FreeResources(2.0, 16 * GB, 0.0)
    assert admission.choose(NEEDS, refuse_on([node] * 3)) == (NEEDS._replace(fewer=()), None)
    taken, why = admission.choose(NEEDS, refuse_on([node, node]))
    assert taken is not None
    assert taken.workers == 2
    assert "3 workers of 2 cores and 1.0 GB are needed, the cluster has room for 2" in str(why)
    taken, why = admission.choose(NEEDS, refuse_on([]))
    assert taken is None
    assert "1 workers of 2 cores and 2.0 GB are needed, the cluster has room for 0" in str(why)


async def test_what_cannot_be_elastic_is_refused_by_name(reading: httpx.AsyncClient) -> None:
    async def refused(**fields: Any) -> dict[str, Any]:
        answer = await reading.post("/v1/jobs", params={"dry_run": True}, json=job_body(**fields))
        assert answer.status_code == 422, answer.text
        return dict(answer.json()["errors"][0])

    said = await refused(resources={"num_workers": 2, "min_workers": 3})
    assert "min_workers 3 is more than num_workers 2: lower it" in said["message"]
    assert "min_workers" in (await refused(resources={"num_workers": 2, "min_workers": 0}))["field"]
    said = await refused(resources=ELASTIC, sharding={"item": "grid"})
    assert said["field"] == "sharding.item"
    assert "with resources.min_workers 1 an attempt may have any number up to 3" in said["message"]
    assert "row_wise" in said["remedy"]
    answer = await reading.post(
        "/v1/jobs", params={"dry_run": True}, json=job_body(resources=ELASTIC, sharding={"item": "row_wise"})
    )
    assert answer.status_code == 200, answer.text


async def test_fewest_workers_that_do_not_fit_their_memory_are_refused_by_name(
    settings: Settings, dataset_body: dict[str, Any], data_file: Any
) -> None:
    rows = list(range(60_000))
    table = {"user": rows, "item": rows, "rating": [5] * len(rows), "date": ["2026-01-01"] * len(rows)}
    pq.write_table(pa.table(table), data_file)
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        await client.post("/v1/datasets", json=dataset_body)
        split = {"user": "row_wise", "item": "row_wise"}

        async def estimated(workers: int) -> int:
            body = job_body(resources={"num_workers": workers}, sharding=split)
            answer = await client.post("/v1/jobs", params={"dry_run": True}, json=body)
            return int(answer.json()["estimate"]["peak_memory_bytes_per_rank"])

        limit = (await estimated(4) + await estimated(1)) // 2
        resources = {"num_workers": 4, "memory_bytes_per_worker": limit}
        for min_workers, status in ((4, 200), (1, 422)):
            body = job_body(resources={**resources, "min_workers": min_workers}, sharding=split)
            answer = await client.post("/v1/jobs", params={"dry_run": True}, json=body)
            assert answer.status_code == status, answer.text
    said = answer.json()["errors"][0]
    assert said["message"].startswith("with resources.min_workers 1: a rank needs")
    assert said["remedy"].startswith("raise it")


async def test_a_job_begins_with_what_is_free_and_grows_when_it_goes_on(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    """On a host of two cores: three are never there, two not yet; what is not taken is another job's."""
    settings = dataclasses.replace(settings, role="all", max_runs=4, host_cores=2, host_memory_bytes=64 * GB)
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)

            async def submit(behave: str, **fields: Any) -> str:
                answer = await client.post("/v1/jobs", json=job_body(behave, **fields))
                assert answer.status_code == 202, answer.text
                return str(answer.json()["id"])

            first = await submit("hang")
            await wait_for(client, first, "running")
            elastic = await submit("hang", resources=ELASTIC, retries=0)
            begun = await wait_for(client, elastic, "running")
            (attempt,) = begun["attempts"]
            assert (attempt["attempt"], attempt["workers"]) == (1, 1)
            assert "3 cores needed, this host has 2 cores" in attempt["because"]
            run = json.loads((settings.run_dir(elastic) / "run.json").read_text())
            assert run["workers"] == {"number": 1, "because": attempt["because"]}
            assert run["job"]["resources"]["num_workers"] == 3
            waiting = await submit("succeed")

            async def told() -> Any:
                return (await client.get(f"/v1/jobs/{waiting}")).json()["reason"]

            assert f"{elastic} (1 core" in await until(told)
            await client.post(f"/v1/jobs/{first}/cancel")
            await wait_for(client, waiting, "succeeded")

            # Its machine asks it to end: it goes on by itself, with more, though it has no retry.
            pid = json.loads((settings.run_dir(elastic) / PROCESS_FILE).read_text())["pid"]
            os.kill(pid, signal.SIGTERM)

            async def second() -> Any:
                job = (await client.get(f"/v1/jobs/{elastic}")).json()
                assert job["state"] != "cancelled"
                return job if job["attempt"] == 2 and job["state"] == "running" else None

            grown = await until(second)
            assert grown["attempts"][1]["workers"] == 2
            assert grown["error"] is None
            states = await _states(app, elastic)
            assert [data["state"] for data in states] == [
                "queued", "starting", "running", "queued", "starting", "running",
            ]  # fmt: skip
            assert "preempted: its machine asked it to end" in states[3]["reason"]
            assert (states[1]["workers"], states[4]["workers"]) == (1, 2)
            assert states[1]["reason"] == f"1 of 3 workers: {attempt['because']}"
            report = await client.get(f"/v1/jobs/{elastic}/report", headers={"Accept": "text/html"})
            assert "Attempt 1 had 1 of 3 workers: 3 workers: 3 cores" in report.text
            await client.post(f"/v1/jobs/{elastic}/cancel")
            assert (await wait_for(client, elastic, "cancelled"))["attempt"] == 2


async def _states(app: Any, job_id: str) -> list[dict[str, Any]]:
    table = tables.job_event
    query = table.select().where(table.c.job_id == job_id, table.c.type == "state").order_by(table.c.id)
    async with app.state.database.read() as connection:
        return [row.data for row in await connection.execute(query)]


async def test_what_a_run_finds_of_its_cluster_is_shown(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings
) -> None:
    """A node was gone between the claim and the start of the ranks."""
    job = (await client.post("/v1/jobs", json=job_body(resources=ELASTIC))).json()
    events = [{"type": "workers", "attempt": 2, "number": 1, "because": "room for 1", "time": "2026-01-01T00:00:00Z"}]
    directory = _with_events(settings, job["id"], events)
    async with app.state.database.write() as connection:
        row = await _begun(connection, job["id"], attempts=[{"attempt": 2, "workers": 3, "because": None}])
        await run_events.apply(connection, row, directory, True, 1.0)
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert shown["attempts"] == [{"attempt": 2, "workers": 1, "because": "room for 1"}]


async def test_a_preemption_whose_event_was_lost_is_known_by_the_exit_file(
    app: Any, client: httpx.AsyncClient, dataset: str, settings: Settings
) -> None:
    job = (await client.post("/v1/jobs", json=job_body(retries=0))).json()
    directory = _with_events(settings, job["id"], [])
    write_json(directory / EXIT_FILE, {"attempt": 2, "state": "cancelled", "retryable": False})
    async with app.state.database.write() as connection:
        row = await _begun(connection, job["id"])
        await run_events.died(connection, row, directory, 1.0, None)
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert (shown["state"], shown["error"]) == ("queued", None)
    assert shown["reason"].startswith("preempted")


def _with_events(settings: Settings, job_id: str, events: list[dict[str, Any]]) -> Any:
    directory = settings.run_dir(job_id)
    directory.mkdir()
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


async def _begun(connection: Any, job_id: str, **columns: Any) -> Any:
    row = await job_records.locked(connection, job_id)
    started = {"attempt": 2, "lease": "a", "launched_at": tables.now(), "state": "running", "released": True}
    await job_records.change(connection, row, **started, **columns)
    return row
