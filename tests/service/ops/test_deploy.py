"""The image and the compose file: what they must never lose. Neither is run here."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from service import DEFAULT_PORT
from service.core.settings import Settings
from tests.service.test_default_port import CONTAINER_PORT

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BIN = Path(sys.executable).parent
OURS = ("api-1", "api-2", "scheduler", "vectors")


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def words(service: dict[str, Any]) -> str:
    """Everything that a service runs."""
    return " ".join(str(part) for key in ("entrypoint", "command") for part in service.get(key) or [])


def roles(name: str) -> Any:
    command = services()[name]["command"]
    return command[command.index("--role") + 1]


def substituted(environment: dict[str, str]) -> dict[str, str]:
    """As compose does with variables that are not set: their defaults."""
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in environment.items()}


def joins_ray(service: dict[str, Any]) -> bool:
    return "ray start" in words(service) or "EVENKEEL_RAY_ADDRESS" in (service.get("environment") or {})


def test_there_is_what_the_service_needs():
    others = {
        "proxy",
        "postgres",
        "redis",
        "s3",
        "ray-head",
        "ray-worker",
        "secrets",
        "metrics-key",
        "prometheus",
        "grafana",
    }
    assert set(services()) == {*OURS, *others}
    assert {name for name, service in services().items() if joins_ray(service)} == {*OURS, "ray-head", "ray-worker"}


def test_roles_are_shared_out():
    """One process looks after jobs; the API is there twice."""
    assert {name: Settings(role=roles(name)).role for name in OURS} == {
        "api-1": "api", "api-2": "api", "scheduler": "scheduler", "vectors": "vectors",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted({*services()} - {"postgres", "redis", "s3"}))
def test_no_container_writes_to_its_root_or_gains_rights(name: str):
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", [*OURS, "ray-head", "ray-worker"])
def test_every_ray_process_takes_the_token(name: str):
    """`ray start` without it opens a cluster on which anyone who reaches it can run code."""
    service = services()[name]
    environment = service["environment"]
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/run/evenkeel/ray/token"
    assert "ray_secrets:/run/evenkeel/ray:ro" in service["volumes"]


@pytest.mark.parametrize("name", ["ray-head", "ray-worker"])
def test_what_runs_jobs_sees_no_secret_but_the_clusters_own(name: str):
    """A run needs its directory and the feature store: not the database, not the service's keys."""
    service = services()[name]
    mounted = {volume.split(":")[0] for volume in service["volumes"]} - {"${EVENKEEL_DATA"}
    assert mounted == {"ray_secrets", "runs", "store"}
    assert not re.search("(?i)database|pgpass|password", str(service["environment"]))


def test_the_service_submits_to_the_heads_dashboard():
    """The settings that the file makes are ones that the service takes, and both sides see the runs at one path."""
    api, head, worker = (services()[name] for name in ("scheduler", "ray-head", "ray-worker"))
    assert all(services()[name]["environment"] == api["environment"] for name in OURS)
    (home,) = re.findall(r"EVENKEEL_HOME=(\S+)", DOCKERFILE.read_text())
    settings = Settings.from_environment({"EVENKEEL_HOME": home, **substituted(api["environment"])})
    assert {*OURS} <= {*settings.allowed_hosts}, "Prometheus and metrics-key ask them by name"
    assert settings.executor == "ray_jobs"
    assert settings.ray_address == "http://ray-head:8265"
    assert settings.internal_url is None
    assert "--dashboard-host=0.0.0.0" in head["command"]
    assert "--num-cpus=0" in head["command"]
    shared = {f"runs:{settings.runs}", f"store:{settings.store_url}"}
    assert all(shared <= set(service["volumes"]) for service in (api, head, worker))


def test_every_secret_that_is_read_is_generated():
    generated = words(services()["secrets"])
    read = set(re.findall(r"/run/evenkeel/(\w+/\w+)", COMPOSE.read_text()))
    read -= {"metrics/key"}  # metrics-key makes it
    assert {"ray/token", "database/postgres_password", "database/pgpass", "grafana/password", "s3/password"} <= read
    for name in read:
        assert name.removesuffix("pgpass").removesuffix("/") in generated, name
    assert "> pgpass.new" in generated
    assert "secrets.token_hex(32)" in generated
    assert "umask 077" in generated


def test_secrets_are_generated_once_and_stay(tmp_path: Path):
    """The script of the secrets service, run as it stands."""
    (script,) = services()["secrets"]["command"]
    script = script.replace("$$", "$").replace("/run/evenkeel", str(tmp_path)).replace("python ", f"{sys.executable} ")
    seen = []
    for name in ("ray", "database", "grafana", "s3"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        subprocess.run(["sh", "-ceu", script], check=True)
        seen.append({f"{path.parent.name}/{path.name}": path.read_text() for path in tmp_path.glob("*/*")})
    first, second = seen
    assert first == second
    passwords = {"database/postgres_password", "database/redis_password", "grafana/password", "s3/password"}
    assert set(first) == {"ray/token", "database/pgpass", *passwords}
    assert re.fullmatch(r"[0-9a-f]{64}", first["ray/token"])
    assert first["database/pgpass"] == f"postgres:5432:*:evenkeel:{first['database/postgres_password']}\n"
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*/*"))


def test_no_secret_is_written_down():
    text = COMPOSE.read_text()
    assert not re.search(r"(?i)(password|token|key)\s*[:=]\s*['\"]?[a-z0-9]{8,}", text)
    assert "POSTGRES_PASSWORD:" not in text


def test_only_the_proxy_and_grafana_are_published_and_only_on_this_host():
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {
        "proxy": [f"127.0.0.1:${{EVENKEEL_PORT:-{DEFAULT_PORT}}}:{CONTAINER_PORT}"],
        "grafana": ["127.0.0.1:${EVENKEEL_GRAFANA_PORT:-3000}:3000"],
    }


def test_every_long_running_service_has_a_health_check():
    dockerfile = DOCKERFILE.read_text()
    assert "HEALTHCHECK" in dockerfile
    for name, service in services().items():
        if name not in ("secrets", "metrics-key", *OURS):
            assert service["healthcheck"]["test"], name


def test_the_health_check_asks_the_port_of_the_container():
    """The image's own command, against a server that is healthy and against none."""
    (command,) = re.findall(r"HEALTHCHECK [^[]*CMD (\[.*\])", DOCKERFILE.read_text())
    _, option, code = json.loads(command)

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

    def healthy(port: int) -> bool:
        there = code.replace(f":{CONTAINER_PORT}/", f":{port}/")
        done = subprocess.run([sys.executable, option, there], cwd=ROOT, stderr=subprocess.DEVNULL, check=False)
        return done.returncode == 0

    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert healthy(server.server_port)
        server.shutdown()
    assert not healthy(server.server_port)


def test_image_runs_as_a_user_and_installs_from_the_lock():
    text = DOCKERFILE.read_text()
    user = re.findall(r"(?m)^USER (\S+)", text)[-1]
    assert user.split(":")[0] not in ("root", "0")
    assert "deploy/setup.sh" in text
    stages = re.findall(r"(?m)^FROM (\S+)", text)
    assert len(stages) == 2
    assert all(re.fullmatch(r"python:\$\{PYTHON\}-\S+", stage) for stage in stages)


def test_what_the_image_copies_is_there_and_not_ignored():
    kept = [
        line[1:] for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", DOCKERFILE.read_text()):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(Path(source).match(pattern) or source.startswith(pattern) for pattern in kept), source


def test_every_variable_of_the_compose_file_has_its_default_in_the_example():
    asked = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE.read_text()))
    lines = [line for line in (ROOT / ".env.example").read_text().splitlines() if line and line[0] != "#"]
    given = dict(line.split("=", 1) for line in lines)
    assert given.pop("COMPOSE_PROFILES") == ""
    assert given == asked


def test_prometheus_scrapes_each_process_of_the_service():
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())["scrape_configs"]
    (targets,) = job["static_configs"]
    assert job["job_name"] == "evenkeel", "the alerts say so"
    assert targets["targets"] == [f"{name}:{CONTAINER_PORT}" for name in OURS]


def test_what_is_mounted_from_here_is_here():
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), name


def test_the_proxy_takes_its_configuration():
    haproxy = shutil.which("haproxy")
    if haproxy is None:
        pytest.skip("no haproxy on this machine")
    configuration = ROOT / "deploy" / "haproxy.cfg"
    done = subprocess.run([haproxy, "-c", "-f", configuration], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_keeps_what_the_service_needs_and_no_tool():
    """What deploy/prune.py would uninstall from this very environment."""
    script = "import runpy; print(*runpy.run_path('deploy/prune.py')['needed']('evenkeel', {'cpu', 'otel'}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = set(done.stdout.split())
    assert {
        "evenkeel",
        "torch",
        "torchrec",
        "fbgemm-gpu-cpu",
        "ray",
        "fastapi",
        "uvicorn",
        "asyncpg",
        "aiohttp",
    } <= kept
    assert "opentelemetry-exporter-otlp-proto-http" in kept
    assert not {"pytest", "ruff", "mypy", "ziglang", "playwright", "moto", "hypothesis", "pip-audit"} & kept


def test_images_are_not_built_without_a_tool_that_builds(tmp_path: Path):
    for program in ("bash", "dirname", "sed"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    done = subprocess.run(
        [ROOT / "deploy" / "images.sh"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "neither podman nor buildah nor a running docker is available: install one" in done.stderr


def test_validators():
    checks = {
        "check-jsonschema": ["--builtin-schema", "vendor.compose-spec", str(COMPOSE)],
        "hadolint": [str(DOCKERFILE)],
    }
    for program, arguments in checks.items():
        done = subprocess.run([BIN / program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


INTERPRETER = """\
#!/bin/bash
# Stands for Python: makes an environment of itself, and has pip killed where PIP says so.
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/evenkeel" && chmod +x "$3/bin/evenkeel" ;;
  *" install "*) touch "$(dirname "$0")/../half-a-package"; [ "$PIP" = killed ] && kill -9 $$; exit 0 ;;
esac
"""


def test_a_set_up_that_was_cut_off_is_made_anew(tmp_path):
    """pip stumbles over packages that it was killed amid. One that ended is left alone."""
    (tmp_path / "deploy").mkdir()
    for name in ("deploy/setup.sh", "deploy/versions.sh", "deploy/requirements-cpu.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(INTERPRETER)
    python.chmod(0o755)

    def set_up(pip):
        environment = os.environ | {"PYTHON": str(python), "VENV": ".venv", "EXTRA": "cpu", "PIP": pip}
        return subprocess.run(
            [tmp_path / "deploy" / "setup.sh"], env=environment, capture_output=True, text=True, check=False
        )

    assert set_up("killed").returncode != 0
    (tmp_path / ".venv" / "of-the-first").touch()
    again = set_up("whole")
    assert again.returncode == 0, again.stderr
    assert "the last set-up was cut off" in again.stdout
    assert not (tmp_path / ".venv" / "of-the-first").exists()
    (tmp_path / ".venv" / "of-the-second").touch()
    assert set_up("killed").stdout == ""
    with (tmp_path / "pyproject.toml").open("a") as changed:
        changed.write("\n")
    assert set_up("whole").returncode == 0
    assert (tmp_path / ".venv" / "of-the-second").exists()
