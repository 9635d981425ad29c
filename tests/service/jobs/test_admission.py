"""Who may run beside whom, in figures; over HTTP: refused with the arithmetic, queued with the reason, in order."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from service.core.settings import Settings
from service.jobs import admission, job_records, resource_prediction
from service.jobs.admission import ResourceRequest
from service.jobs.executors.base import FreeResources
from tests.service.service_kit import BOTH, client_of, job_body, running, until, wait_for
from tests.service.small_run import SmallRuns
from trainer.sizing.memory import PROCESS_BYTES, RUN_BYTES

GB = 10**9
HOST = FreeResources(4.0, 16 * GB, 1.0)


def needs(
    cores: float = 1, memory: int = 2 * GB, gpus: float = 0, workers: int = 1, counted: bool = True
) -> ResourceRequest:
    return ResourceRequest(workers, cores, memory, gpus, counted)


# --- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (needs(cores=5), "5 cores needed, this host has 4 cores"),
        (needs(memory=17 * GB), "17.0 GB needed, this host has 16.0 GB"),
        (needs(gpus=2), "2 GPUs needed, this host has 1 GPU"),
    ],
)
def test_what_can_never_fit_is_said_with_its_figures(asked: ResourceRequest, said: str) -> None:
    problem = admission.impossible(asked, HOST)
    assert problem is not None
    assert said in problem[0]
    assert problem[1]
    assert admission.impossible(needs(4, 16 * GB, 1), HOST) is None


def test_a_bound_on_memory_is_no_reason_to_refuse() -> None:
    assert admission.impossible(needs(memory=17 * GB, counted=False), HOST) is None
    assert admission.impossible(needs(cores=5, counted=False), HOST) is not None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (needs(cores=2), "needs 2 cores, 1 core of 4 cores free; in use by job_a (3 cores, 10.0 GB)"),
        (needs(memory=7 * GB), "needs 7.0 GB, 6.0 GB of 16.0 GB free"),
        (needs(cores=1, memory=GB, gpus=2), "needs 2 GPUs, 1 GPU of 1 GPU free"),
        (needs(cores=1, memory=6 * GB, gpus=1), None),
    ],
)
def test_what_does_not_fit_now_says_what_it_waits_for(asked: ResourceRequest, said: str | None) -> None:
    held = {"job_a": needs(cores=3, memory=10 * GB)}
    found = admission.obstacle(asked, HOST, held, max_runs=8)
    assert found is None if said is None else found is not None and said in found


def test_the_number_of_runs_is_limited_too() -> None:
    held = {"job_a": needs(), "job_b": needs()}
    found = admission.obstacle(needs(), HOST, held, max_runs=2)
    assert found == "waiting for job_a (1 core, 2.0 GB), job_b (1 core, 2.0 GB): 2 runs at a time (EVENKEEL_MAX_RUNS)"
    assert admission.obstacle(needs(), HOST, held, max_runs=3) is None


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 16), st.integers(0, 1)), max_size=12))
def test_what_is_admitted_never_exceeds_the_host(asked: list[tuple[int, int, int]]) -> None:
    held: dict[str, ResourceRequest] = {}
    for number, (cores, memory, gpus) in enumerate(asked):
        one = needs(cores, memory * GB, gpus)
        if admission.obstacle(one, HOST, held, max_runs=99) is None:
            held[f"job_{number}"] = one
    assert sum(one.cores for one in held.values()) <= HOST.cpus
    assert sum(one.memory_bytes for one in held.values()) <= HOST.memory_bytes
    assert sum(one.gpus for one in held.values()) <= HOST.gpus
    assert held or not asked, "one that fits alone is never kept waiting"


def test_on_a_cluster_each_worker_needs_a_node() -> None:
    asked = ResourceRequest(3, 6.0, 3 * GB + RUN_BYTES, 0, True)
    nodes = [FreeResources(4.0, 8 * GB, 0.0), FreeResources(3.0, 8 * GB, 0.0)]
    assert admission.cluster_obstacle(asked, nodes, {}, 9) is None
    found = admission.cluster_obstacle(
        asked, [FreeResources(4.0, 8 * GB, 0.0), FreeResources(8.0, GB // 2, 0.0)], {}, 9
    )
    assert found is not None
    assert "3 workers of 2 cores and 1.0 GB are needed, the cluster has room for 2" in found
    assert admission.cluster_obstacle(asked, None, {}, 9) is None
    assert "job_a" in str(admission.cluster_obstacle(asked, None, {"job_a": asked}, 1))


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_can_never_fit_is_refused_with_the_arithmetic(
    settings: Settings, dataset_body: dict[str, Any]
) -> None:
    settings = dataclasses.replace(settings, host_cores=2, host_memory_bytes=3 * GB)
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        await client.post("/v1/datasets", json=dataset_body)
        answer = await client.post("/v1/jobs", json=job_body(resources={"num_workers": 3}))
        assert answer.status_code == 422, answer.text
        said = answer.json()["errors"][0]
        assert said["field"] == "resources"
        assert "3 cores needed, this host has 2 cores" in said["message"]
        assert "GB needed, this host has 3.0 GB" in said["message"]
        assert "EVENKEEL_HOST_CORES" in said["remedy"]
        job = (await client.post("/v1/jobs", json=job_body(resources={"num_workers": 1}))).json()
        assert job["needs"]["cores"] == 1
        assert job["needs"]["counted"] is True
        assert PROCESS_BYTES + RUN_BYTES < job["needs"]["memory_bytes"] < 2 * (PROCESS_BYTES + RUN_BYTES)


@pytest.mark.anyio
async def test_memory_is_predicted_from_the_rows_that_are_counted(
    settings: Settings, dataset_body: dict[str, Any], data_file: Path
) -> None:
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        await client.post("/v1/datasets", json=dataset_body)
        few = (await client.post("/v1/jobs", json=job_body())).json()["needs"]
        rows = list(range(20_000))
        table = {"user": rows, "item": rows, "rating": [5] * len(rows), "date": ["2026-01-01"] * len(rows)}
        pq.write_table(pa.table(table), data_file)
        many = (await client.post("/v1/jobs", json=job_body())).json()["needs"]
        estimate = (await client.post("/v1/jobs", params={"dry_run": True}, json=job_body())).json()["estimate"]
    assert many["memory_bytes"] == estimate["peak_memory_bytes"]
    assert many["memory_bytes"] - few["memory_bytes"] > 2 * 19_900 * 16 * 4


@pytest.mark.anyio
@BOTH
async def test_runs_side_by_side_as_far_as_the_host_goes_and_in_order(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two small ones run together; a large one waits for both, and no small one overtakes it. Those whose dataset is
    too large to be counted at once are counted when their turn comes."""
    monkeypatch.setattr(resource_prediction, "AT_ONCE_BYTES", 0)
    settings = dataclasses.replace(settings, role="all", max_runs=4, host_cores=2, host_memory_bytes=64 * GB)
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)

            async def submit(workers: int, behave: str = "hang") -> str:
                answer = await client.post("/v1/jobs", json=job_body(behave, resources={"num_workers": workers}))
                assert answer.status_code == 202, answer.text
                assert answer.json()["needs"] is None
                return str(answer.json()["id"])

            first, second = await submit(1), await submit(1)
            for job in (first, second):
                await wait_for(client, job, "running")
            large, small = await submit(2, "told"), await submit(1, "succeed")

            async def reasons() -> Any:
                shown = [(await client.get(f"/v1/jobs/{job}")).json() for job in (large, small)]
                told = [str(job["reason"]) for job in shown]
                return told if "needs 2 cores" in told[0] and large in told[1] else None

            of_large, of_small = await until(reasons)
            assert "0 cores of 2 cores free" in of_large
            assert first in of_large
            assert second in of_large
            assert of_small == admission.behind(large, of_large)

            await client.post(f"/v1/jobs/{first}/cancel")
            await wait_for(client, first, "cancelled")

            async def one_core_is_free() -> Any:
                return "1 core of 2 cores free" in str((await client.get(f"/v1/jobs/{large}")).json()["reason"])

            await until(one_core_is_free)
            await asyncio.sleep(5 * settings.follow_seconds)
            assert (await client.get(f"/v1/jobs/{small}")).json()["state"] == "queued", "it may not overtake"
            await client.post(f"/v1/jobs/{second}/cancel")
            await wait_for(client, large, "running")
            (settings.run_dir(large) / "finish").touch()
            done = [await wait_for(client, job, "succeeded") for job in (large, small)]
            assert done[0]["finished_at"] < done[1]["started_at"]
            assert done[1]["needs"]["counted"] is True


@pytest.mark.anyio
async def test_a_job_that_turns_out_not_to_fit_fails_with_the_arithmetic(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_prediction, "AT_ONCE_BYTES", 0)
    settings = dataclasses.replace(settings, role="all", host_cores=2)
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            body = job_body("succeed", resources={"num_workers": 3}, retries=3)
            job = (await client.post("/v1/jobs", json=body)).json()
            after = (await client.post("/v1/jobs", json=job_body("succeed"))).json()
            done = await wait_for(client, job["id"], "failed")
            assert done["error"]["code"] == "does-not-fit"
            assert "3 cores needed, this host has 2 cores" in done["error"]["message"]
            assert done["attempt"] == 1
            await wait_for(client, after["id"], "succeeded")
    assert len(runs.launched) == 1


@pytest.mark.anyio
async def test_files_that_are_gone_are_the_runs_to_tell(
    service: httpx.AsyncClient, data_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_prediction, "AT_ONCE_BYTES", 0)
    first = (await service.post("/v1/jobs", json=job_body("hang"))).json()
    await wait_for(service, first["id"], "running")
    second = (await service.post("/v1/jobs", json=job_body("succeed"))).json()
    data_file.unlink()
    await service.post(f"/v1/jobs/{first['id']}/cancel")
    done = await wait_for(service, second["id"], "failed")
    assert "no such file" in done["error"]["message"]
    assert done["needs"]["counted"] is False


async def test_a_name_that_is_no_text_keeps_nobody_waiting(
    app: FastAPI, client: httpx.AsyncClient, dataset_body: dict[str, Any], data_file: Path
) -> None:
    folder = data_file.with_name("several")
    folder.mkdir()
    shutil.copy(data_file, folder / "good.parquet")
    body = {**dataset_body, "uri": str(folder)}
    assert (await client.post("/v1/datasets", json=body)).status_code == 201
    job = (await client.post("/v1/jobs", json=job_body())).json()
    shutil.copy(data_file, os.fsencode(folder) + b"/\xff.parquet")
    refused = await client.post("/v1/datasets/infer", json={"uri": str(folder)})
    assert (refused.status_code, "is not UTF-8" in refused.text) == (422, True)
    async with app.state.database.read() as connection:
        row = await job_records.get(connection, job["id"])
    assert resource_prediction.of_row(app.state.settings, row).counted is False


async def test_whatever_counting_fails_by_the_queue_goes_on(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = (await client.post("/v1/jobs", json=job_body())).json()
    async with app.state.database.read() as connection:
        row = await job_records.get(connection, job["id"])

    def fails(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(resource_prediction, "estimate", fails)
    assert resource_prediction.of_row(app.state.settings, row).counted is False


@pytest.mark.anyio
async def test_a_spec_that_is_not_read_any_more_ends_its_job_and_not_the_queue(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_prediction, "AT_ONCE_BYTES", 0)
    async with running(settings) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await client.post("/v1/datasets", json=dataset_body)
            old, after = [(await client.post("/v1/jobs", json=job_body("succeed"))).json()["id"] for _ in range(2)]
        async with app.state.database.write() as connection:
            row = await job_records.locked(connection, old)
            await job_records.change(connection, row, spec={**row["spec"], "a_field_of_the_past": 1})
    async with running(dataclasses.replace(settings, role="all"), executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            await wait_for(client, after, "succeeded")
            done = await wait_for(client, old, "failed")
            assert done["error"]["code"] == "spec-unreadable"
            assert done["error"]["message"] == "a_field_of_the_past: no such field: check the spelling"
            assert done["error"]["remedy"]


@pytest.mark.anyio
async def test_what_a_job_waits_for_names_no_job_of_another_tenant(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], data_file: Path
) -> None:
    roots = (("ads", data_file.parent),)
    settings = dataclasses.replace(settings, role="all", tenant_data_roots=roots)
    async with running(settings, executor=runs) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            theirs = {"Evenkeel-Tenant": "ads"}
            for headers in ({}, theirs):
                answer = await client.post("/v1/datasets", json=dataset_body, headers=headers)
                assert answer.status_code == 201, answer.text
            first = (await client.post("/v1/jobs", json=job_body("hang"))).json()["id"]
            await wait_for(client, first, "running")
            waiting = [
                (await client.post("/v1/jobs", json=job_body("succeed"), headers=headers)).json()["id"]
                for headers in (theirs, {}, theirs)
            ]

            async def reasons() -> Any:
                found = [(await client.get(f"/v1/jobs/{job_id}")).json()["reason"] for job_id in waiting]
                return found if found[0] and all("first in line" in (reason or "") for reason in found[1:]) else None

            said = await until(reasons)
            await client.post(f"/v1/jobs/{first}/cancel")
    assert first not in " ".join(said)
    assert "another tenant's run" in said[0]
    assert said[1] == admission.BEHIND_ANOTHER_TENANT
    assert waiting[0] in said[2]
