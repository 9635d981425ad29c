"""The service with real training: killed -9 while a run trains, the run killed after it, and a refresh that is held."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
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

from tests.service.forked_service import Forked, evenkeel
from trainer.runs import run_process
from trainer.runs.protocol import PROCESS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

RUN_SECONDS = 500.0


def until(look: Callable[[], Any], seconds: float = RUN_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"nothing came within {seconds} s"
        time.sleep(0.1)
    return value


class Service:
    """``serve`` in a process, over one home."""

    def __init__(self, home: Path, data: Path):
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
        self._environment = {**kept, "EVENKEEL_HOME": str(home), "EVENKEEL_DATA_ROOTS": str(data)}
        self._environment["EVENKEEL_RETRY_BACKOFF_SECONDS"] = "1"
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self.client = httpx.Client()
        self._process: Forked | None = None

    def start(self) -> None:
        self._process = Forked(self.home.with_suffix(".err"), self._environment, evenkeel, "serve", "--port", "0")
        url = self._process.stdout.readline().split()[-1]
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=20), timeout=300) as waiting:
            assert waiting.get("/readyz").status_code == 200
        key = (self.home / "admin.key").read_text().strip()
        self.client.close()
        self.client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=300)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``evenkeel ...`` as a user gives it."""
        evenkeel = Path(sys.executable).with_name("evenkeel")
        environment = self._environment | {"EVENKEEL_URL": str(self.client.base_url)}
        return subprocess.run([evenkeel, *arguments], env=environment, capture_output=True, text=True, check=False)

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.client.get(f"/v1/jobs/{job_id}").raise_for_status().json())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    rng = np.random.default_rng(0)
    rows = 30_000
    taste = rng.normal(size=(200, 4)) @ rng.normal(size=(4, 150))
    user, item = rng.integers(0, 200, rows), rng.integers(0, 150, rows)
    like = rng.random(rows) < 1 / (1 + np.exp(-taste[user, item]))
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"user": user, "item": item, "click": like.astype("int8")}), data / "clicks.parquet")
    service = Service(tmp_path / "home", data)
    try:
        service.start()
        yield service
    finally:
        service.client.close()
        service.kill()
        for run in (service.home / "runs").glob("job_*"):
            run_process.terminate(run, 0)


@pytest.mark.timeout(900)
def test_kill_9_of_the_service_and_of_the_run_and_then_a_refresh_that_is_held(service: Service, tmp_path: Path) -> None:
    dataset = {
        "name": "clicks",
        "uri": str(tmp_path / "data" / "clicks.parquet"),
        "features": {"user": {}, "item": {}},
        "label": {"column": "click"},
    }
    service.client.post("/v1/datasets", json=dataset).raise_for_status()
    epochs = 24
    body = {
        "name": "real",
        "dataset": {"name": "clicks"},
        "model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [16]},
        "epochs": epochs,
        "batch_size": 128,
        "checkpoint": {"every_steps": 100},
        "publish": {"collection": "items", "feature": "item", "gate": {"mode": "report"}},
    }
    job = service.client.post("/v1/jobs", json=body).raise_for_status().json()
    directory = service.home / "runs" / job["id"]
    until(lambda: service.job(job["id"])["metrics"])
    pid = json.loads((directory / PROCESS_FILE).read_text())["pid"]

    service.kill()
    assert psutil.pid_exists(pid), "the run trains on"
    size = (directory / "events.jsonl").stat().st_size
    until(lambda: (directory / "events.jsonl").stat().st_size > size)
    with suspended(directory):  # so that it need not train for as long as a service takes to start
        service.start()
    seen = until(lambda: service.job(job["id"])["progress"])
    found = service.job(job["id"])
    assert (found["state"], found["attempt"]) == ("running", 1), found["error"]
    until(lambda: service.job(job["id"])["progress"]["step"] > seen["step"])

    os.kill(pid, signal.SIGKILL)
    done = until(lambda: (one := service.job(job["id"]))["state"] in ("succeeded", "failed") and one)
    assert (done["state"], done["attempt"]) == ("succeeded", 2), done["error"]
    validation = [one["epoch"] for one in done["metrics"] if one["split"] == "validation"]
    assert validation == list(range(1, epochs + 1)), "each epoch once, those before the kill included"
    assert done["metrics"][-1]["auc"] > 0.55
    assert done["publication"]["status"] == "published"
    current = service.client.get("/v1/collections/items/versions/current").raise_for_status().json()
    assert current["version"] == done["publication"]["version"]
    assert current["job"] == job["id"]
    log = service.client.get(f"/v1/jobs/{job['id']}/logs").text
    assert "from initial values" in log
    assert log.rindex("resum") > log.index("from initial values"), "the second attempt goes on from a checkpoint"

    # A refresh without a warm start, and hardly trained: other vectors under the same ids.
    refresh = body | {"name": "refresh", "epochs": 1, "seed": 1, "publish": {"collection": "items", "feature": "item"}}
    (tmp_path / "refresh.yaml").write_text(json.dumps(refresh))
    said = service.command("submit", str(tmp_path / "refresh.yaml"), "--wait")
    assert said.returncode == 3, said
    assert "cosine_mean" in said.stdout
    assert "The model is worse" in said.stdout, said.stdout
    assert service.client.get("/v1/collections/items/versions/current").json()["version"] == current["version"]
    held = service.client.get("/v1/collections/items/versions").json()["items"][0]
    assert (held["state"], held["parent"]) == ("held", current["version"])
    assert held["reasons"]


@contextlib.contextmanager
def suspended(directory: Path) -> Iterator[None]:
    processes = run_process.processes(directory)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def put_clicks(folder: Path, number: int, rows: int = 2000) -> None:
    """Let a file of clicks appear whole."""
    rng = np.random.default_rng(number)
    user, item = rng.integers(0, 200, rows), rng.integers(0, 150, rows)
    table = pa.table({"user": user, "item": item, "click": ((user + item) % 3 == 0).astype("int8")})
    pq.write_table(table, folder / f".{number}.tmp")
    os.rename(folder / f".{number}.tmp", folder / f"{number}.parquet")


@pytest.mark.timeout(900)
def test_a_job_follows_a_folder_publishes_as_files_appear_and_goes_on_after_a_cancel(
    service: Service, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "stream"
    folder.mkdir()
    put_clicks(folder, 0)
    dataset = {"name": "stream", "uri": str(folder), "features": {"user": {}, "item": {}}, "label": {"column": "click"}}
    service.client.post("/v1/datasets", json=dataset).raise_for_status()
    body = {
        "name": "follow",
        "dataset": {"name": "stream", "one_pass": True, "follow": {"poll_seconds": 0.1, "until": "_END"}},
        "model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [16]},
        "optimizer": {"kind": "adam_ar", "alpha": 0.001},
        "tables": {"user": {"capacity": 300}, "item": {"capacity": 300}},
        "batch_size": 128,
        "checkpoint": {"every_seconds": 0.2},
        "evaluation": {"split": {"validation": 0, "test": 0}, "progressive_rows": 1000},
        "publish": {"collection": "items", "feature": "item", "gate": {"mode": "report"}, "every_seconds": 0.2},
    }
    job = service.client.post("/v1/jobs", json=body).raise_for_status().json()

    def published(after: int) -> Any:
        said = service.job(job["id"])
        assert said["state"] in ("queued", "starting", "running"), said["error"]
        return (said["publication"] or {}).get("step", 0) > after and said

    first = until(lambda: published(0))
    assert first["publication"]["status"] == "published"
    put_clicks(folder, 1)
    second = until(lambda: published(first["publication"]["step"]))
    assert second["publication"]["version"] > first["publication"]["version"]
    assert {one["split"] for one in second["metrics"]} == {"progressive"}

    service.client.post(f"/v1/jobs/{job['id']}/cancel").raise_for_status()
    until(lambda: service.job(job["id"])["state"] == "cancelled")
    put_clicks(folder, 2)
    (folder / "_END").touch()
    service.client.post(f"/v1/jobs/{job['id']}/retry").raise_for_status()
    done = until(lambda: (one := service.job(job["id"]))["state"] in ("succeeded", "failed") and one)
    assert done["state"] == "succeeded", done["error"]
    assert done["progress"]["examples"] == 3 * 2000
    assert (done["progress"]["files"], done["progress"]["files_behind"]) == (3, 0)
    versions = service.client.get("/v1/collections/items/versions").json()["items"]
    steps = [one["training_step"] for one in reversed(versions)]
    assert steps == sorted(set(steps))
    assert steps[-1] == done["progress"]["step"] == -(-3 * 2000 // 128)
    assert {one["job"] for one in versions} == {job["id"]}
