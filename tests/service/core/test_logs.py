"""The service's log: JSON lines that a machine reads, with the id of the request that a line belongs to."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.core import logs
from service.core.settings import Settings
from tests.service import serving
from tests.service.service_kit import client_of, job_body, running, until
from tests.service.small_run import SmallRuns

pytestmark = pytest.mark.anyio


class Kept(logging.Handler):
    """Keeps what was logged, as its lines."""

    def __init__(self, formatter: logging.Formatter):
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    handler = Kept(logs.JsonLines())
    logging.getLogger().addHandler(handler)
    monkeypatch.setattr(logs.access, "level", logging.INFO)
    logs.access.manager._clear_cache()
    yield handler
    logging.getLogger().removeHandler(handler)


async def test_a_request_has_an_id_that_its_line_and_its_answer_say(client: httpx.AsyncClient, kept: Kept) -> None:
    answer = await client.get("/v1/jobs/job_none")
    (line,) = [one for one in kept.documents() if one["logger"] == "evenkeel.access"]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("GET", "/v1/jobs/{job_id}", 404)
    assert line["job_id"] == "job_none"
    assert line["key_id"].startswith("key_")
    assert line["seconds"] > 0
    other = await client.get("/healthz")
    assert other.headers["x-request-id"] != answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        ("abc-123_x.y", True),
        ("short", False),
        ("a" * 65, False),
        ('x"}\n{"level": "info', False),
        ("ok ok ok ok", False),
    ],
)
def test_an_offered_id_is_taken_if_it_is_fit_for_a_log(offered: str, taken: bool) -> None:
    assert (logs.take_request_id(offered) == offered) is taken


async def test_a_failure_says_which_request_it_was(app: FastAPI, kept: Kept) -> None:
    @app.get("/fails")
    async def fails() -> None:
        raise RuntimeError("planted")

    async with client_of(app) as client:
        answer = await client.get("/fails", headers={"X-Request-Id": "from-a-proxy-1"})
    assert answer.status_code == 500
    (line,) = [one for one in kept.documents() if "traceback" in one]
    assert line["level"] == "error"
    assert line["request_id"] == answer.headers["x-request-id"] == "from-a-proxy-1"
    assert "planted" in line["traceback"]


class NeverStarts(SmallRuns):
    def launch(self, run_dir: Path) -> int:
        raise OSError("planted")


class NeverLooks(SmallRuns):
    def is_alive(self, run_dir: Path) -> bool:
        raise ZeroDivisionError("planted")


@pytest.mark.process
@pytest.mark.parametrize("executor", [NeverStarts, NeverLooks])
async def test_what_fails_in_the_runner_says_which_job_it_was(
    settings: Settings, dataset_body: dict[str, Any], kept: Kept, executor: type[SmallRuns]
) -> None:
    settings, runs = dataclasses.replace(settings, role="all"), executor()
    try:
        async with running(settings, executor=runs) as app:
            async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
                await client.post("/v1/datasets", json=dataset_body)
                job = (await client.post("/v1/jobs", json=job_body(retries=0))).json()["id"]

                async def told() -> Any:
                    return [one for one in kept.documents() if "planted" in one.get("traceback", "")]

                line = (await until(told))[0]
    finally:
        runs.end_all()
    assert line["logger"] in ("evenkeel.runner", "evenkeel")
    # A round that failed is told of by its TaskHealth, which knows no job: the error itself names it.
    assert line.get("job_id") == job or f"in the runner's step for job {job}" in line["traceback"]
    assert ("job_id" in line) == (executor is NeverStarts)


async def test_no_secret_is_in_the_log(client: httpx.AsyncClient, admin_key: str, kept: Kept) -> None:
    made = (await client.post("/v1/keys", json={"name": "k", "scopes": ["jobs:read"]})).json()["key"]
    await client.post("/session", json={"key": made})
    await client.get(f"/v1/jobs?cursor={made}")
    everything = "\n".join(kept.lines)
    assert len(kept.lines) >= 3
    assert made not in everything
    assert admin_key not in everything


def test_lines_cannot_be_forged(kept: Kept) -> None:
    logging.getLogger("evenkeel").warning("first\n%s", '{"level": "error", "message": "made up"}')
    (line,) = kept.lines
    assert "\n" not in line
    assert json.loads(line)["message"].startswith("first\n")


def test_lines_for_people_cannot_be_forged_either() -> None:
    made_up = "x\n2026-01-01 ERROR evenkeel: made up\x1b[2J"
    record = logging.LogRecord("evenkeel", logging.INFO, "", 0, "GET %s", (made_up,), None)
    record.fields = {"job_id": made_up}
    line = logs.TextLines().format(record)
    assert line.isprintable()
    assert line.count("made up") == 2


def test_text_for_people() -> None:
    handler = Kept(logs.TextLines())
    logger = logging.getLogger("evenkeel.test_text")
    logger.addHandler(handler)
    token = logs.request_id.set("abcdefgh")
    try:
        logger.warning("said", extra=logs.with_fields(rows=3))
    finally:
        logs.request_id.reset(token)
        logger.removeHandler(handler)
    assert handler.lines[0].endswith("WARNING evenkeel.test_text: said request_id=abcdefgh rows=3")


@pytest.mark.process
@pytest.mark.parametrize("form", ["json", "text"])
def test_a_served_process_logs_in_the_form_that_was_asked_for(tmp_path: Path, form: str) -> None:
    asked = {"EVENKEEL_LOG_FORMAT": form, "EVENKEEL_ACCESS_LOG": "1"}
    with serving.serving(tmp_path, "api", log=tmp_path / "log", **asked) as one:
        httpx.get(f"{one.url}/healthz", timeout=300).raise_for_status()
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "/healthz" in line]
    assert lines
    if form == "json":
        assert json.loads(lines[0])["route"] == "/healthz"
    else:
        assert "route=/healthz" in lines[0]


@pytest.mark.process
def test_a_misspelt_form_is_refused_with_the_remedy(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(serving.EVENKEEL), "serve", "--port", "0"],
        env={"PATH": "/usr/bin", "EVENKEEL_HOME": str(tmp_path), "EVENKEEL_LOG_FORMAT": "jason"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "EVENKEEL_LOG_FORMAT" in done.stderr
    assert "json or text" in done.stderr
    assert "Traceback" not in done.stderr
