"""kill -9 of the service while runs train, fire and publish: the next start knows everything and lost nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.service import small_server
from tests.service.forked_service import Forked
from tests.service.service_kit import job_body
from trainer.runs.protocol import PROCESS_FILE
from trainer.runs.run_process import terminate

pytestmark = pytest.mark.process


class Server:
    """A served home that is started, killed and started again."""

    def __init__(self, home: Path, data: Path):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
        path = os.pathsep.join(filter(None, sys.path))
        self.home = home
        self._environment = {
            **kept,
            "EVENKEEL_HOME": str(home),
            "EVENKEEL_DATA_ROOTS": str(data),
            "PYTHONPATH": path,
        }
        self._process: Forked | None = None
        self.client = httpx.Client()

    def start(self) -> None:
        self._process = Forked(self.home.with_suffix(".err"), self._environment, small_server.main)
        url = self._process.stdout.readline().split()[-1]
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(base_url=url, transport=transport, timeout=300) as waiting:
            assert waiting.get("/readyz").status_code == 200
        key = (self.home / "admin.key").read_text().strip()
        self.client.close()
        self.client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=300)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._gone()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._gone()

    def _gone(self) -> int:
        assert self._process is not None
        code = self._process.wait(timeout=300)
        self._process.stdout.close()
        return code

    def end(self) -> None:
        self.client.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for run in (self.home / "runs").glob("job_*"):
            terminate(run, 0)

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.client.get(f"/v1/jobs/{job_id}").raise_for_status().json())


def until(look: Callable[[], Any], seconds: float = 300.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"nothing came within {seconds} s"
        time.sleep(0.03)
    return value


@pytest.fixture
def server(tmp_path: Path, data_file: Path, dataset_body: dict[str, Any]) -> Iterator[Server]:
    server = Server(tmp_path / "served", data_file.parent)
    try:
        server.start()
        server.client.post("/v1/datasets", json=dataset_body).raise_for_status()
        yield server
    finally:
        server.end()


def test_kill_9_of_the_service_during_training_loses_nothing(server: Server) -> None:
    """Killed at three points of one run: the run trains on, and is one attempt with every event once."""
    job = server.client.post("/v1/jobs", json=job_body("told", epochs=1000)).raise_for_status().json()
    waiting = server.client.post("/v1/jobs", json=job_body("succeed")).raise_for_status().json()
    until(lambda: server.job(job["id"])["progress"])
    pid = json.loads((server.home / "runs" / job["id"] / PROCESS_FILE).read_text())["pid"]
    for _ in range(3):
        seen = server.job(job["id"])["progress"]["epoch"]
        server.kill()
        assert psutil.pid_exists(pid), "the run trains on"
        server.start()
        until(lambda: server.job(job["id"])["progress"]["epoch"] > seen)  # noqa: B023
    (server.home / "runs" / job["id"] / "finish").touch()
    done = until(lambda: (found := server.job(job["id"]))["state"] == "succeeded" and found)
    assert done["attempt"] == 1
    epochs = [one["epoch"] for one in done["metrics"]]
    assert len(epochs) > 6
    assert epochs == list(range(1, len(epochs) + 1))
    assert server.client.get(f"/v1/jobs/{job['id']}/logs").text.count("begins") == 1
    events = server.client.get(f"/v1/jobs/{job['id']}/events").text
    assert events.count("event: metric") == len(epochs)
    until(lambda: server.job(waiting["id"])["state"] == "succeeded")


def test_killed_while_cancelling_the_cancel_is_carried_out(server: Server) -> None:
    job = server.client.post("/v1/jobs", json=job_body("hang")).raise_for_status().json()
    until(lambda: server.job(job["id"])["state"] == "running")
    server.client.post(f"/v1/jobs/{job['id']}/cancel").raise_for_status()
    server.kill()
    server.start()
    until(lambda: server.job(job["id"])["state"] == "cancelled")


def test_everything_killed_the_job_is_tried_again(server: Server) -> None:
    job = server.client.post("/v1/jobs", json=job_body("told", epochs=1000)).raise_for_status().json()
    until(lambda: server.job(job["id"])["progress"])
    server.kill()
    terminate(server.home / "runs" / job["id"], 0)
    (server.home / "runs" / job["id"] / "finish").touch()
    server.start()
    done = until(lambda: (found := server.job(job["id"]))["state"] == "succeeded" and found)
    assert done["attempt"] == 2


def test_sigterm_ends_the_service_and_not_the_run(server: Server) -> None:
    job = server.client.post("/v1/jobs", json=job_body("told", epochs=1000)).raise_for_status().json()
    until(lambda: server.job(job["id"])["progress"])
    pid = json.loads((server.home / "runs" / job["id"] / PROCESS_FILE).read_text())["pid"]
    assert server.stop() == 0
    assert psutil.pid_exists(pid)
    (server.home / "runs" / job["id"] / "finish").touch()
    server.start()
    done = until(lambda: (found := server.job(job["id"]))["state"] == "succeeded" and found)
    assert done["attempt"] == 1


def follow(server: Server, job_id: str, last_event_id: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, data) of metric events as they come, until the stream ends or breaks."""
    headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
    fields: dict[str, str] = {}
    with server.client.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
                continue
            if fields.get("event") == "metric":
                yield fields["id"], json.loads(fields["data"])
            fields = {}


def test_a_reader_of_events_goes_on_where_the_killed_service_left_it(server: Server) -> None:
    """Events come while the job runs, and after a kill -9 each comes once: none twice, none lost."""
    job = server.client.post("/v1/jobs", json=job_body("told", epochs=1000)).raise_for_status().json()
    until(lambda: server.job(job["id"])["metrics"])
    seen: list[int] = []
    ids: list[str] = []

    def take(number: int, events: Iterator[tuple[str, dict[str, Any]]]) -> None:
        for event_id, data in islice(events, number):
            seen.append(data["epoch"])
            ids.append(event_id)

    reader = follow(server, job["id"], None)
    take(5, reader)
    assert server.job(job["id"])["state"] == "running"
    server.kill()
    with contextlib.suppress(httpx.HTTPError):
        take(1000, reader)  # what was on its way
    server.start()
    rest = follow(server, job["id"], ids[-1])
    take(20, rest)
    (server.home / "runs" / job["id"] / "finish").touch()
    take(1000, rest)
    assert len(seen) >= 25
    assert seen == list(range(1, len(seen) + 1))
    assert server.job(job["id"])["state"] == "succeeded"
