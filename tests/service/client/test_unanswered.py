"""An executor that does not answer for a while: nothing is given up for it, and the job says so when it takes long."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import app
from service.core import task_health
from service.core.settings import Settings
from service.jobs.executors.base import ExecutorUnavailable, FreeResources
from tests.service.service_kit import client_of, running, submit, until, wait_for
from tests.service.small_run import SmallRuns
from trainer.runs.protocol import EXIT_ENVIRONMENT

pytestmark = pytest.mark.anyio


class Away(SmallRuns):
    """Small runs of a cluster that can be cut off."""

    away = False
    lost_answer = False
    asked = 0
    free = 4.0
    code: int | None = None

    def _answer(self) -> None:
        self.asked += 1
        if self.away:
            raise ExecutorUnavailable("the cluster does not answer: refused")

    def launch(self, run_dir: Path) -> int:
        self._answer()
        pid = super().launch(run_dir)
        if self.lost_answer:
            self.lost_answer = False
            raise ExecutorUnavailable("the answer was lost")
        return pid

    def is_alive(self, run_dir: Path) -> bool:
        self._answer()
        return super().is_alive(run_dir)

    def terminate(self, run_dir: Path, grace_seconds: float) -> bool:
        self._answer()
        return super().terminate(run_dir, grace_seconds)

    def exit_code(self, run_dir: Path) -> int | None:
        return self.code

    def ping(self) -> None:
        self._answer()

    def room(self) -> list[FreeResources]:
        self._answer()
        return [FreeResources(self.free, 2**40, 0)]


@pytest.fixture
def cluster() -> Any:
    runs = Away()
    yield runs
    runs.end_all()


@pytest.fixture
async def service(settings: Settings, cluster: Away, dataset_body: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    settings = dataclasses.replace(
        settings, role="all", executor="ray_jobs", ray_address="http://127.0.0.1:9", unanswered_seconds=0.3
    )
    async with running(settings, executor=cluster) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            yield client


async def says(client: httpx.AsyncClient, job_id: str, words: str) -> dict[str, Any]:
    async def look() -> Any:
        job = (await client.get(f"/v1/jobs/{job_id}")).json()
        return job if words in (job["reason"] or "") else None

    return dict(await until(look))


async def rounds(cluster: Away, number: int = 5) -> None:
    before = cluster.asked

    async def asked() -> bool:
        return cluster.asked >= before + number

    await until(asked)


async def test_a_run_is_not_given_up_for_a_cluster_that_does_not_answer(
    service: httpx.AsyncClient, cluster: Away, settings: Settings
) -> None:
    job_id = (await submit(service, "told", retries=0))["id"]
    await wait_for(service, job_id, "running")
    cluster.away = True
    job = await says(service, job_id, "has not answered since")
    assert job["state"] == "running"
    assert "the cluster does not answer: refused" in job["reason"]
    # What it says itself goes on being heard.
    seen = len(job["metrics"])

    async def more() -> bool:
        return len((await service.get(f"/v1/jobs/{job_id}")).json()["metrics"]) > seen

    await until(more)
    cluster.away = False
    (settings.run_dir(job_id) / "finish").touch()
    done = await wait_for(service, job_id, "succeeded", "failed")
    assert (done["state"], done["attempt"], done["reason"]) == ("succeeded", 1, None)
    assert len(cluster.launched) == 1


async def test_a_cancel_waits_for_the_cluster(service: httpx.AsyncClient, cluster: Away) -> None:
    job_id = (await submit(service, "hang"))["id"]
    await wait_for(service, job_id, "running")
    cluster.away = True
    await service.post(f"/v1/jobs/{job_id}/cancel")
    job = await says(service, job_id, "has not answered since")
    assert job["state"] == "cancelling"
    cluster.away = False
    assert (await wait_for(service, job_id, "cancelled"))["error"] is None


async def test_a_launch_whose_answer_was_lost_is_adopted(service: httpx.AsyncClient, cluster: Away) -> None:
    cluster.lost_answer = True
    job_id = (await submit(service, "succeed", epochs=2))["id"]
    done = await wait_for(service, job_id, "succeeded", "failed")
    assert (done["state"], done["attempt"]) == ("succeeded", 1)
    assert [one["epoch"] for one in done["metrics"]] == [1, 2]


async def test_jobs_wait_in_our_queue_for_a_cluster_with_room(service: httpx.AsyncClient, cluster: Away) -> None:
    cluster.away = True
    job_id = (await submit(service, "succeed", resources={"num_workers": 2, "cpus_per_worker": 1}))["id"]
    job = await says(service, job_id, "does not answer")
    assert job["state"] == "queued"
    cluster.free, cluster.away = 1.0, False
    job = await says(service, job_id, "2 workers of 1 core")
    assert (job["state"], job["attempt"]) == ("queued", 0)
    await rounds(cluster)
    assert cluster.launched == []
    cluster.free = 2.0
    assert (await wait_for(service, job_id, "succeeded", "failed"))["state"] == "succeeded"


async def test_readiness_tells_that_the_cluster_is_away(
    settings: Settings, cluster: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "PING_SECONDS", 0.02)
    monkeypatch.setattr(task_health, "TROUBLE_SECONDS", 0.0)
    cluster.away = True
    async with running(dataclasses.replace(settings, role="all"), executor=cluster) as service:
        async with client_of(service) as client:

            async def executor(words: str) -> Any:
                state = (await client.get("/readyz")).json()
                return state if words in state["checks"]["executor"] else None

            state = await until(lambda: executor("the cluster of the runs cannot be used"))
            assert state["status"] == "degraded"
            assert "refused" not in state["checks"]["executor"], "anyone may read this"
            cluster.away = False
            assert (await until(lambda: executor("ok")))["status"] == "ok"


@pytest.mark.parametrize(
    ("code", "error", "retries"), [(EXIT_ENVIRONMENT, "wrong-environment", 2), (137, "run-died", 0)]
)
async def test_the_error_has_the_exit_code_and_another_environment_is_not_tried_again(
    service: httpx.AsyncClient, cluster: Away, code: int, error: str, retries: int
) -> None:
    cluster.code = code
    done = await wait_for(service, (await submit(service, "die", retries=retries))["id"], "failed")
    assert (done["error"]["code"], done["attempt"]) == (error, 1)
    assert f"exit code {code}" in done["error"]["message"]
    assert "epoch 1" in done["error"]["message"], "the last line of the log"
