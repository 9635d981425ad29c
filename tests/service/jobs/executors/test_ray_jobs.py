"""Training jobs through the REST API on a real Ray cluster: published, though the service or the head is killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.jobs import run_events
from tests.contracts import store_servers
from tests.service.serving import serving
from tests.support.free_ports import free_port
from tests.support.ray_cluster import Cluster
from trainer.runs import run_process
from trainer.spec import parse_job
from trainer.storage.storage_registry import open_storage

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


def until(look: Callable[[], Any], what: Callable[[], object] = lambda: "", seconds: float = 600.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"nothing came within {seconds} s: {what()}"
        time.sleep(0.2)
    return value


class Service:
    """A service process whose runs are jobs of ``cluster``; killed and started again on one port."""

    def __init__(self, folder: Path, cluster: Any, **more: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.environment = {
            "EVENKEEL_EXECUTOR": "ray_jobs",
            "EVENKEEL_RAY_ADDRESS": cluster.dashboard,
            "EVENKEEL_UNANSWERED_SECONDS": "1",
            "EVENKEEL_RETRY_BACKOFF_SECONDS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": cluster.token,
            **more,
        }
        if "EVENKEEL_RUN_STORAGE" in more:
            self.environment["EVENKEEL_INTERNAL_URL"] = self.url
        self.client = httpx.Client(base_url=self.url, timeout=300)
        self._serving: Any = None

    def start(self) -> None:
        self._serving = serving(
            self.folder, "all", "--port", str(self.port), log=self.folder / "service.log", **self.environment
        )
        self.served = self._serving.__enter__()
        self.client.headers["Authorization"] = f"Bearer {self.served.key}"

    def kill(self) -> None:
        self.served.process.kill()
        self.served.process.stdout.close()
        with pytest.raises(AssertionError):  # it asks for an orderly end
            self._serving.__exit__(None, None, None)
        self._serving = None

    def stop(self) -> None:
        if self._serving is not None:
            self._serving.__exit__(None, None, None)
        self.client.close()

    def register(self) -> None:
        rng = np.random.default_rng(0)
        user, item = rng.integers(0, 60, 3000), (rng.random(3000) ** 2 * 120).astype(np.int64)
        click = (rng.random(3000) < np.array([0.05, 0.4, 0.95])[item % 3]).astype(np.int64)
        path = self.folder / "data" / "clicks.parquet"
        pq.write_table(pa.table({"user": user, "item": item, "click": click}), path)
        features = {"user": {"type": "id"}, "item": {"type": "id"}}
        body = {"name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"}}
        assert self.client.post("/v1/datasets", json=body).status_code == 201

    def submit(self, **changes: Any) -> str:
        body = {
            "name": "small",
            "dataset": {"name": "clicks"},
            "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]},
            "optimizer": {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003},
            "batch_size": 96,
            "checkpoint": {"every_steps": 25},
            "resources": {"num_workers": 2, "cpus_per_worker": 1},
            "publish": {"collection": "items", "feature": "item", "gate": {"mode": "off"}},
            **changes,
        }
        parse_job(body)
        answer = self.client.post("/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.client.get(f"/v1/jobs/{job_id}").json())

    def events(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        """What the job's stream has told so far."""
        found: list[dict[str, Any]] = []
        with self.client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                    if name == "log":  # after all events that there are
                        return found
                elif line.startswith("data: ") and name == kind:
                    found.append(json.loads(line.removeprefix("data: ")))
        return found

    def log(self, job_id: str) -> str:
        return self.client.get(f"/v1/jobs/{job_id}/logs").text

    def wait(self, job_id: str, look: Callable[[dict[str, Any]], Any], ended: bool = False) -> dict[str, Any]:
        def once() -> Any:
            job = self.job(job_id)
            assert ended or job["state"] not in ("succeeded", "failed", "cancelled"), (job, self.log(job_id)[-5000:])
            return job if look(job) else None

        def told() -> tuple[Any, str, str]:
            service_log = (self.folder / "service.log").read_text()[-3000:]
            return self.job(job_id), self.log(job_id)[-5000:], service_log

        return dict(until(once, told))

    def ended(self, job_id: str) -> dict[str, Any]:
        return self.wait(job_id, lambda job: job["state"] in ("succeeded", "failed", "cancelled"), ended=True)


def processes_of(directory: Path) -> list[psutil.Process]:
    return run_process.processes(directory)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(cluster: Any, **more: str) -> Service:
        service = Service(tmp_path, cluster, **more)
        services.append(service)
        service.start()
        service.register()
        return service

    yield start
    for service in services:
        service.stop()


def test_runs_of_a_cluster_that_shares_nothing_outlive_the_service_and_the_head(
    started: Any, mortal_ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has a cache alone; events come over HTTP. The service and then the cluster's head are killed; the retry
    goes on, on a new head. What the job left lies in the bucket, and goes with the job."""
    cluster = mortal_ray_cluster
    access = {name: value for name, value in cluster.environment.items() if name.startswith("AWS_")}
    for name, value in access.items():
        monkeypatch.setenv(name, value)
    with store_servers.s3_server(port=cluster.s3_port):
        service = started(
            cluster, EVENKEEL_RUN_STORAGE="s3://vectors/runs", EVENKEEL_CACHE=str(tmp_path / "here"), **access
        )
        storage = open_storage("s3://vectors/runs")
        # The head is to be killed within its steps.
        long = {"epochs": 80, "batch_size": 48, "checkpoint": {"every_steps": 250}}
        job_id = service.submit(**long, resources={"num_workers": 1})
        before = service.wait(job_id, lambda job: job["metrics"])
        service.kill()
        service.start()
        service.wait(job_id, lambda job: len(job["metrics"]) > len(before["metrics"]))
        here = service.served.settings.run_dir(job_id)
        assert not (here / "checkpoints").exists()
        assert any("checkpoints/" in one.name for one in storage.list(job_id))

        cluster.kill_head()
        # The dashboard is away: the job keeps its place and says so.
        job = service.wait(job_id, lambda job: "has not answered since" in (job["reason"] or ""))
        assert (job["state"], job["attempt"]) == ("running", 1)
        until(lambda: cluster.processes() == [])

        cluster.start_head(num_cpus=2)
        done = service.ended(job_id)
        assert (done["state"], done["attempt"]) == ("succeeded", 2), service.log(job_id)
        assert done["publication"]["status"] == "published"
        epochs = [one["epoch"] for one in done["metrics"] if one["split"] == "train"]
        assert epochs == list(range(1, 81))
        # Ranks that have lost their head train on until they notice it: perhaps to the last step, but not beyond.
        # The job's end comes by HTTP; its log is fetched when the cluster says that it ended.
        until(lambda: "resuming after step" in service.log(job_id), lambda: service.log(job_id)[-5000:])
        assert run_events.read_exit(here, 2)["code"] == 0
        # Its processes may be about to end.
        until(lambda: service.client.delete(f"/v1/jobs/{job_id}").status_code == 204)
        assert storage.list(job_id) == []


def test_a_job_of_a_cluster_that_shares_its_run_directories_is_published(ray_cluster: Any, started: Any) -> None:
    service = started(ray_cluster)
    job_id = service.submit(epochs=2)
    done = service.ended(job_id)
    assert (done["state"], done["attempt"], done["error"]) == ("succeeded", 1, None), service.log(job_id)
    assert done["publication"]["status"] == "published"
    assert [one["epoch"] for one in done["metrics"] if one["split"] == "train"] == [1, 2]
    log = service.log(job_id)
    assert log.count(f"Running entrypoint for job {job_id}-1") == 1
    assert "epoch 2" in log
    answer = service.client.post("/v1/collections/items/vectors", json={"ids": [1, 2]})
    assert answer.status_code == 200
    assert {item["status"] for item in answer.json()["items"]} == {"found"}


# Minutes: `make test-long` has them.
if os.environ.get("EVENKEEL_TEST_NODES"):

    @pytest.mark.long
    def test_a_job_goes_on_with_the_nodes_that_are_left_and_grows_again(started: Any) -> None:
        """One of two nodes is drained, as by a cloud's notice; the other one is killed when there are two new ones."""
        cluster = Cluster()
        try:
            cluster.start_head()
            killed, drained = cluster.start_node(num_cpus=1), cluster.start_node(num_cpus=1)
            service = started(cluster)
            long = {"epochs": 1000, "checkpoint": {"every_steps": 20}, "retries": 1}
            job_id = service.submit(**long, resources={"num_workers": 2, "min_workers": 1})
            before = service.wait(job_id, lambda job: job["metrics"])
            assert before["attempts"] == [{"attempt": 1, "workers": 2, "because": None}]

            cluster.drain_node(drained, seconds=300)
            begun = service.wait(job_id, lambda job: job["attempt"] == 2 and job["state"] == "running")
            reasons = [one.get("reason") for one in service.events(job_id, "state") if one["state"] == "queued"]
            assert "preempted" in str(reasons[1])
            assert begun["attempts"][1]["workers"] == 1
            assert "place" in begun["attempts"][1]["because"] or "room" in begun["attempts"][1]["because"]
            epochs = len(begun["metrics"])
            service.wait(job_id, lambda job: len(job["metrics"]) > epochs)
            cluster.kill_node(drained)
            cluster.start_node(num_cpus=1)
            cluster.start_node(num_cpus=1)
            cluster.kill_node(killed)
            # A preemption was no failure: this is the first of one.
            grown = service.wait(job_id, lambda job: job["attempt"] == 3 and job["state"] == "running")
            assert grown["attempts"][2] == {"attempt": 3, "workers": 2, "because": None}
            assert "retry 1 of 1" in service.events(job_id, "state")[-3]["reason"]
            epochs = len(grown["metrics"])
            service.wait(job_id, lambda job: len(job["metrics"]) > epochs)
            assert service.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
            assert service.ended(job_id)["state"] == "cancelled"
            assert "1 of 2 workers" in service.log(job_id)
        finally:
            cluster.stop()

    @pytest.mark.long
    def test_a_job_is_cancelled(ray_cluster: Any, started: Any) -> None:
        """The whole way; of its parts there are tests: the executors' contract, SIGTERM, a run in a joined cluster."""
        service = started(ray_cluster)
        long = service.submit(epochs=1000)
        service.wait(long, lambda job: job["metrics"])
        assert service.client.post(f"/v1/jobs/{long}/cancel").status_code == 202
        assert service.ended(long)["state"] == "cancelled"
        events = (service.served.settings.run_dir(long) / "events.jsonl").read_text()
        assert '"state":"cancelled"' in events, "it had the time to write its checkpoint"
        until(lambda: processes_of(service.served.settings.run_dir(long)) == [])
