"""A run on another machine reports to a real service that is killed and comes back: nothing lost, nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from embeddings.durable_files import write_json
from service.identity import run_tokens
from service.jobs import run_events
from tests.service.serving import Served, dataset, job, serving
from tests.support.free_ports import free_port
from trainer.runs import uplink
from trainer.runs.directory import Report, Run, read_run, write_run
from trainer.runs.events import EventWriter, read_events
from trainer.runs.failures import LeaseLostError, ServiceAwayError
from trainer.spec import parse_dataset, parse_job

pytestmark = [pytest.mark.slow, pytest.mark.process]


class Elsewhere:
    """A service that can be killed and started again on its port, and an attempt of it with a directory of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port = free_port()
        self._serving: Any = None
        self.service: Served
        self.start()
        self.run = self._claimed()

    def start(self) -> None:
        self._serving = serving(self.folder, "api", "--port", str(self.port))
        self.service = self._serving.__enter__()

    def stop(self, kill: bool = False) -> None:
        if kill:
            self.service.process.kill()
            assert self.service.process.stdout is not None
            self.service.process.stdout.close()
        if self._serving is not None:
            # It asks for an orderly end, which a killed one has not.
            with contextlib.suppress(AssertionError) if kill else contextlib.nullcontext():
                self._serving.__exit__(None, None, None)
        self._serving = None

    def _claimed(self) -> Run:
        """What the runner does before it submits."""
        body = dataset(self.service.data)
        headers = {"Authorization": f"Bearer {self.service.key}"}
        with httpx.Client(base_url=self.service.url, headers=headers, timeout=300) as client:
            assert client.post("/v1/datasets", json=body).status_code == 201
            answer = client.post("/v1/jobs", json=job())
            assert answer.status_code == 202, answer.text
        job_id = answer.json()["id"]
        self.set_job(job_id, state="running", attempt=1, lease="lease", released=0)
        self.here = self.service.settings.run_dir(job_id)
        self._write_run(self.here, job_id, body)
        self.job_id = job_id
        there = self.folder / "there" / job_id
        uplink.fetch_run(there, f"{self.service.url}/internal/runs/{job_id}", self.token)
        return read_run(there)

    def _write_run(self, directory: Path, job_id: str, body: dict[str, Any]) -> None:
        self.token = run_tokens.issue(self.service.home, job_id, 1, "lease")
        report = Report(f"{self.service.url}/internal/runs/{job_id}", self.token, run_events.size(directory))
        write_run(
            directory, run_id=job_id, job=parse_job(job()), dataset=parse_dataset(body), store_url="store",
            lease={"token": "lease"}, report=report,
        )  # fmt: skip

    def set_job(self, job_id: str, **columns: Any) -> None:
        self.service.set_job(job_id, **columns)

    def copy(self) -> bytes:
        path = self.here / "events.jsonl"
        return path.read_bytes() if path.exists() else b""

    def written(self) -> bytes:
        return (self.run.directory / "events.jsonl").read_bytes()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    monkeypatch.setattr(uplink, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(uplink, "FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(uplink, "LONGEST_WAIT_SECONDS", 0.2)
    found = Elsewhere(tmp_path)
    yield found
    found.stop()


def until(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not seen within {seconds} s"
        time.sleep(0.02)


def test_nothing_is_lost_while_the_service_is_killed(elsewhere: Elsewhere) -> None:
    run = elsewhere.run
    with uplink.reporting(run):
        events = EventWriter(run.directory, run.attempt)
        for number in range(300):
            events.write("metric", epoch=number, split="train", auc=0.5)
            if number == 100:
                until(lambda: elsewhere.copy() == elsewhere.written())
                elsewhere.stop(kill=True)
            if number == 200:
                elsewhere.start()
        events.write("state", state="succeeded")
        events.close()
        write_json(run.directory / "exit.json", {"attempt": 1, "state": "succeeded", "code": 0})
    assert elsewhere.copy() == elsewhere.written()
    assert run_events.read_exit(elsewhere.here, 1)["state"] == "succeeded"


class _Gateway(BaseHTTPRequestHandler):
    """What answers in the place of a service that is away: with a page, and 200."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>We are back soon</html>")

    do_POST = do_GET


def test_a_gateways_page_and_a_disk_that_fails_for_a_while_are_waited_out(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "PATIENCE_SECONDS", 0.5)
    run = elsewhere.run
    path, aside = run.directory / "events.jsonl", run.directory / "aside"
    with uplink.reporting(run):
        events = EventWriter(run.directory, run.attempt)
        elsewhere.stop()
        with HTTPServer(("127.0.0.1", elsewhere.port), _Gateway) as gateway:
            threading.Thread(target=gateway.serve_forever, daemon=True).start()
            events.write("heartbeat")
            until(lambda: len(_Gateway.asked) > 1)
            with pytest.raises(ServiceAwayError, match="is not the service: <html>"):
                uplink.fence(run)
            gateway.shutdown()
        elsewhere.start()
        until(lambda: elsewhere.copy() == elsewhere.written())
        path.rename(aside)
        path.mkdir()  # reading it is an OSError
        events.write("heartbeat")
        time.sleep(0.2)
        path.rmdir()
        aside.rename(path)
        until(lambda: elsewhere.copy() == elsewhere.written())
        events.close()


def test_last_words_wait_for_a_service_that_is_away(elsewhere: Elsewhere) -> None:
    run = elsewhere.run
    elsewhere.stop()
    link = uplink.Uplink(run)
    link.start()
    events = EventWriter(run.directory, run.attempt)
    events.write("state", state="failed")
    events.close()
    write_json(run.directory / "exit.json", {"attempt": 1, "state": "failed", "retryable": True})
    elsewhere.start()
    link.close()
    assert elsewhere.copy() == elsewhere.written()
    assert run_events.read_exit(elsewhere.here, 1)["retryable"] is True


def test_a_service_that_stays_away_is_not_waited_for_for_ever(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(uplink, "PATIENCE_SECONDS", 0.5)
    elsewhere.stop()
    with uplink.reporting(elsewhere.run):
        events = EventWriter(elsewhere.run.directory, 1)
        events.write("heartbeat")
        events.close()
    assert "could not be told" in capsys.readouterr().out
    with pytest.raises(ServiceAwayError, match="does not answer"):
        uplink.fence(elsewhere.run)


def test_memory_holds_one_batch(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long silence of the service is caught up with in pieces; a line longer than one comes whole."""
    monkeypatch.setattr(uplink, "BATCH_BYTES", 512)
    run = elsewhere.run
    sizes: list[int] = []
    ask = uplink.Service.ask

    def measured(self: uplink.Service, method: str, path: str = "", **options: Any) -> dict[str, Any]:
        sizes.append(len(options.get("content", b"")))
        return ask(self, method, path, **options)

    monkeypatch.setattr(uplink.Service, "ask", measured)
    events = EventWriter(run.directory, run.attempt)
    with uplink.reporting(run):
        events.write("info", message="x" * 3000)
        for _ in range(100):
            events.write("heartbeat")
        events.close()
    assert elsewhere.copy() == elsewhere.written()
    assert len(sizes) > 5
    assert max(sizes) < 512 * 16


def test_an_attempt_that_was_given_up_hears_of_it(elsewhere: Elsewhere) -> None:
    run = elsewhere.run
    uplink.fence(run)
    with uplink.reporting(run):
        events = EventWriter(run.directory, run.attempt)
        events.write("heartbeat")
        until(lambda: elsewhere.copy() == elsewhere.written())
        before = elsewhere.copy()
        elsewhere.set_job(elsewhere.job_id, lease="of another")
        with pytest.raises(LeaseLostError):
            uplink.fence(run)
        assert run.still_current(), "by its own run.json"
        events.write("state", state="succeeded")
        until(lambda: not run.still_current())
        events.close()
    assert elsewhere.copy() == before
    assert run.report is not None
    # One that was slow to start is told so before it touches anything.
    with pytest.raises(LeaseLostError):
        uplink.fetch_run(
            elsewhere.folder / "fresh", f"{elsewhere.service.url}/internal/runs/{run.run_id}", elsewhere.token
        )
    assert not (elsewhere.folder / "fresh").exists()


def test_a_copy_from_a_backup_goes_on_with_what_is_missing(elsewhere: Elsewhere) -> None:
    run = elsewhere.run
    with uplink.reporting(run):
        events = EventWriter(run.directory, run.attempt)
        for _ in range(20):
            events.write("heartbeat")
        until(lambda: elsewhere.copy() == elsewhere.written())
        os.truncate(elsewhere.here / "events.jsonl", 100)
        events.write("heartbeat")
        until(lambda: elsewhere.copy() == elsewhere.written())
        events.close()


def test_a_renewed_token_is_kept(elsewhere: Elsewhere) -> None:
    run = elsewhere.run

    def renewed() -> str:
        return run_tokens.issue(elsewhere.service.home, run.run_id, 1, "lease")

    until(lambda: renewed() != elsewhere.token)  # a token names the second at which it expires
    kept = renewed()
    link = uplink.Uplink(run)
    link._renew(kept)
    assert json.loads((run.directory / "run.json").read_text())["report"]["token"] == kept
    assert run.still_current()
    link.start()
    link.close()
    # One that cannot be kept now is asked for again.
    link = uplink.Uplink(read_run(run.directory))
    (run.directory / "run.json").rename(elsewhere.folder / "aside")
    link._renew("er_x")
    assert link._service.token == kept
    (elsewhere.folder / "aside").rename(run.directory / "run.json")
    # A newer attempt's file is left alone.
    shutil.copy(run.directory / "run.json", elsewhere.folder / "newer")
    document = json.loads((run.directory / "run.json").read_text()) | {"attempt": 2}
    write_json(run.directory / "run.json", document)
    uplink.Uplink(run)._renew("er_x")
    assert json.loads((run.directory / "run.json").read_text()) == document


def test_epochs_that_could_not_be_reported_any_more_are_told_by_the_next_attempt(elsewhere: Elsewhere) -> None:
    """The driver was killed between its checkpoint and the service's answer; the next one does not train them again."""
    run = elsewhere.run
    link = uplink.Uplink(run)
    link.start()
    events = EventWriter(run.directory, 1)
    events.write("metric", epoch=1, split="train", auc=0.6)
    until(lambda: elsewhere.copy() == elsewhere.written())
    link._done.set()  # killed: nothing is handed on any more
    link._thread.join()
    link._service.close()
    events.write("metric", epoch=2, split="train", auc=0.7)
    events.write("heartbeat")
    events.close()
    there = elsewhere.copy()
    elsewhere.set_job(elsewhere.job_id, attempt=2, lease="next")
    token = run_tokens.issue(elsewhere.service.home, run.run_id, 2, "next")
    document = json.loads((run.directory / "run.json").read_text()) | {"attempt": 2, "lease": {"token": "next"}}
    document["report"] |= {"token": token, "offset": len(there)}
    write_json(run.directory / "run.json", document)
    later = read_run(run.directory)
    with uplink.reporting(later):
        events = EventWriter(later.directory, 2)
        events.write("metric", epoch=3, split="train", auc=0.8)
        events.close()
    told = [event.fields for event in read_events(elsewhere.here)]
    assert [(one["attempt"], one["epoch"], one["auc"]) for one in told] == [(1, 1, 0.6), (2, 2, 0.7), (2, 3, 0.8)]
