"""What holds for the whole application: no torch, problem+json everywhere, hosts, limits, headers, the process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import service.app
from service.api import routes
from service.core.settings import Settings
from tests.service.forked_service import Forked, evenkeel
from tests.service.service_kit import client_of, running
from tests.service.small_run import SmallRuns

pytestmark = pytest.mark.anyio

PROBLEM = "application/problem+json"


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
    return {**kept, "EVENKEEL_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


@pytest.mark.process
def test_import_and_create_app_load_neither_torch_nor_ray(tmp_path: Path) -> None:
    script = """
import sys
import service, service.app
from service.core.settings import Settings
service.app.create_app(Settings.from_environment())
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "torchrec", "ray", "fbgemm_gpu"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(tmp_path / "home"), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    assert not (tmp_path / "home").exists(), "creating the app must not touch the disk"


async def test_errors_of_the_router_are_problems(client: httpx.AsyncClient) -> None:
    for method, path, status in [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/nowhere", 404),
        ("PUT", "/healthz", 405),
        ("GET", "/v1/jobs/job_x", 404),
        ("GET", "/v1/jobs?limit=0", 422),
        ("GET", "/v1/jobs?cursor=%21%21", 422),
        ("GET", "/v1/jobs?state=dancing", 422),
    ]:
        response = await client.request(method, path)
        assert response.status_code == status, path
        assert response.headers["content-type"] == PROBLEM
        body = response.json()
        assert set(body) == {"type", "title", "status", "detail", "errors"}
        assert body["status"] == status
        assert body["detail"]


async def test_validation_names_the_field(client: httpx.AsyncClient) -> None:
    body = {"name": "x", "dataset": {"name": "y"}, "model": {"kind": "dnn"}, "epoch": 4}
    response = await client.post("/v1/jobs", json=body)
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error == {"field": "epoch", "message": "no such field", "remedy": "did you mean epochs?"}
    broken = await client.post("/v1/jobs", content=b'{"name": ', headers={"Content-Type": "application/json"})
    assert broken.status_code == 422
    assert "not JSON" in broken.json()["detail"]


async def test_a_bug_is_a_500_that_tells_nothing(settings: Settings) -> None:
    async with running(settings) as app:

        @app.get("/broken")
        async def broken() -> None:
            raise KeyError("secret of the inside")

        async with client_of(app) as client:
            response = await client.get("/broken")
    assert response.status_code == 500
    assert response.headers["content-type"] == PROBLEM
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "secret" not in response.text


async def test_database_gone_is_503_and_readyz_says_so(app: FastAPI, client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/jobs")).status_code == 200
    database = app.state.database
    await database.stop()
    path = Path(database.url.database)
    for file in path.parent.glob(path.name + "*"):
        file.unlink()
    path.mkdir()  # SQLite cannot open a directory
    response = await client.get("/v1/jobs")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert response.headers["content-type"] == PROBLEM
    assert (await client.get("/healthz")).status_code == 200
    ready = await client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["errors"][0]["field"] == "database"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "", "127.0.0.1.evil.example"])
async def test_foreign_hosts_are_refused(stranger: httpx.AsyncClient, host: str) -> None:
    response = await stranger.get("/healthz", headers={"Host": host})
    assert response.status_code == 421
    assert response.headers["content-type"] == PROBLEM
    assert "EVENKEEL_ALLOWED_HOSTS" in response.json()["detail"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "[::1]:8080", "LOCALHOST", "models.example:80"])
async def test_own_hosts_are_answered(settings: Settings, host: str) -> None:
    settings = dataclasses.replace(settings, allowed_hosts=(*settings.allowed_hosts, "models.example"))
    async with running(settings) as app, client_of(app) as client:
        assert (await client.get("/healthz", headers={"Host": host})).status_code == 200


async def test_body_limit_holds_with_and_without_a_length(settings: Settings) -> None:
    settings = dataclasses.replace(settings, max_body_bytes=1000)

    async def chunks():
        for _ in range(20):
            yield b"x" * 100

    async with running(settings) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            fits = await client.post("/v1/jobs", content=b"x" * 1000)
            long = await client.post("/v1/jobs", content=b"x" * 1001)
            chunked = await client.post("/v1/jobs", content=chunks())
    assert (fits.status_code, long.status_code, chunked.status_code) == (422, 413, 413)
    assert chunked.headers["content-type"] == PROBLEM


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o700), (0o777, 0o700), (0o2775, 0o2770), (0o700, 0o700)])
async def test_a_home_that_exists_is_closed_to_others(settings: Settings, before: int, after: int) -> None:
    settings.home.mkdir(parents=True, exist_ok=True)
    settings.home.chmod(before)
    async with running(settings):
        assert stat.S_IMODE(settings.home.stat().st_mode) == after


async def test_security_headers_are_on_every_answer(stranger: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/nowhere", "/v1/jobs"):
        headers = (await stranger.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"


async def test_openapi_documents_problems_and_keys(stranger: httpx.AsyncClient) -> None:
    document = (await stranger.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert "ProblemBody" in document["components"]["schemas"]
    assert "HTTPBearer" in document["components"]["securitySchemes"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")):
                    content = response["content"]
                    assert list(content) == [PROBLEM], (method, path, status)
    text = json.dumps(document)
    for name in set(_references(document)):
        assert name in document["components"]["schemas"], name
    assert "HTTPValidationError" not in text


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"].rpartition("/")[2]] if isinstance(node.get("$ref"), str) else []
        return own + [name for value in node.values() for name in _references(value)]
    if isinstance(node, list):
        return [name for value in node for name in _references(value)]
    return []


async def test_roles_answer_what_they_serve(settings: Settings) -> None:
    assert routes.for_role("scheduler") == ("health",)
    assert "vectors" in routes.for_role("vectors")
    assert "jobs" not in routes.for_role("vectors")
    async with running(dataclasses.replace(settings, role="scheduler")) as app, client_of(app) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/v1/jobs")).status_code == 404


async def test_a_service_warms_up_and_closes_the_executor_that_it_made_and_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, closed = [], []

    class Runs(SmallRuns):
        def warm_up(self) -> None:
            warm.append(self)

        def close(self) -> None:
            closed.append(self)

    made = Runs()
    monkeypatch.setattr(service.app, "executor_of", lambda settings: made)
    settings = dataclasses.replace(settings, role="all")
    async with running(settings, executor=Runs()):
        pass
    assert (warm, closed) == ([], [])
    async with running(settings):
        while not warm:
            await asyncio.sleep(0.01)
        assert closed == []
    assert (warm, closed) == ([made], [made])


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = Settings.from_environment(
        {
            "EVENKEEL_HOME": str(tmp_path / "h"),
            "EVENKEEL_DATA_ROOTS": f"{tmp_path / 'link'}:{tmp_path}",
            "EVENKEEL_ALLOWED_HOSTS": "Models.Example, other",
            "EVENKEEL_RAY_ADDRESS": "",
        }
    )
    assert found.home == tmp_path / "h"
    assert found.data_roots == (tmp_path / "real", tmp_path)
    assert found.allowed_hosts[-2:] == ("models.example", "other")
    assert found.ray_address is None
    assert found.database_url == f"sqlite+aiosqlite:///{tmp_path}/h/evenkeel.db"
    with pytest.raises(ValueError, match="role 'captain'"):
        Settings(role="captain")  # type: ignore[arg-type]


SERVE = "import sys; from service.app import serve; from service.core.settings import Settings; "
SERVE += "sys.exit(serve(Settings.from_environment(), port=int(sys.argv[1])))"


@pytest.mark.process
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite+aiosqlite:////proc/evenkeel.db", "sqlite+aiosqlite:////proc/evenkeel.db) cannot be used"),
        ("postgresql+asyncpg://someone:secret@127.0.0.1:1/none", "someone:***@127.0.0.1:1/none) cannot be used"),
        ("nonsense", "evenkeel: EVENKEEL_DATABASE_URL is no database URL: write postgresql"),
        ("mysql://root:secret@127.0.0.1/test", "EVENKEEL_DATABASE_URL has the unknown scheme mysql: write postgresql"),
    ],
)
def test_a_database_that_cannot_be_used_is_a_clear_error_and_exit_1(tmp_path: Path, url: str, reason: str) -> None:
    log = tmp_path / "log.txt"
    served = Forked(log, environment(tmp_path / "home", EVENKEEL_DATABASE_URL=url), evenkeel, "serve", "--port", "0")
    code = served.wait(300)
    said = served.stdout.read() + log.read_text()
    served.stdout.close()
    assert code == 1
    assert reason in said
    assert "secret" not in said
    assert "Traceback" not in said


@pytest.mark.process
def test_serve_answers_and_ends_on_sigterm_with_0(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "0"],
        env=environment(tmp_path / "home"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()  # type: ignore[union-attr]
        url = line.strip().rpartition(" ")[2]
        with httpx.Client(base_url=url) as client:  # no retries: it listens when it says so
            assert client.get("/healthz").status_code == 200
            key = (tmp_path / "home" / "admin.key").read_text().strip()
            jobs = client.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"})
            assert jobs.json() == {"items": [], "next_cursor": None}
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, error
    assert key not in line + out, "the key is shown on a terminal only"
