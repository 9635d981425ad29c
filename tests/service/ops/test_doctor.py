"""``evenkeel doctor``: each finding caused for real where a test can cause it."""

from __future__ import annotations

import contextlib
import http.server
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.ops import doctor
from service.ops.doctor import Check
from tests.service import serving
from tests.service.serving import EVENKEEL, Served


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EVENKEEL_API_KEY", "EVENKEEL_URL", "EVENKEEL_RAY_ADDRESS", "EVENKEEL_DATA_ROOTS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))


def levels(checks: Any) -> dict[str, str]:
    return {check.name: check.level for check in checks}


def versions(**found: str) -> Any:
    """Installed versions, a dash for an underscore."""
    known = {name.replace("_", "-"): version for name, version in found.items()}

    def version_of(package: str) -> str:
        if package not in known:
            raise importlib.metadata.PackageNotFoundError(package)
        return known[package]

    return version_of


GOOD = dict.fromkeys(doctor.PACKAGES, "1.0") | {"torch": "2.13.0+cpu"}


@pytest.mark.process
def test_this_machine_passes():
    """The whole of it in its own process, as users call it."""
    done = subprocess.run(
        [EVENKEEL, "doctor", "--json"], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "EVENKEEL_URL": "http://127.0.0.1:9"},
    )  # fmt: skip
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    for name in ("python", "packages", "abi", "load", "gpu", "disk", "data", "ray"):
        assert checks[name]["level"] == "ok", checks[name]
    assert "2.13" in checks["abi"]["message"]
    assert checks["service"]["level"] == "warn"
    assert done.returncode == (1 if "fail" in [check["level"] for check in checks.values()] else 0)


def test_python_is_one_that_the_package_admits():
    def nowhere(package: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(package)

    assert doctor.check_python().level == "ok"
    assert doctor.check_python(lambda _: {"Requires-Python": ">=3.11"}).level == "ok"
    other = doctor.check_python(lambda _: {"Requires-Python": ">=3.98"})
    assert other.level == "fail"
    assert "Python >=3.98" in other.remedy
    assert doctor.check_python(nowhere).remedy == "run `make setup`"


@pytest.mark.process
def test_every_finding_that_is_not_ok_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("EVENKEEL_DATA_ROOTS", str(tmp_path / "nowhere"))
    monkeypatch.setenv("EVENKEEL_RAY_ADDRESS", "nonsense")
    checks = doctor.examine()
    assert {"data", "ray", "service"} <= {check.name for check in checks if check.level != "ok"}
    assert all(bool(check.remedy) == (check.level != "ok") for check in checks)


@pytest.mark.parametrize(
    ("variable", "value", "name", "says"),
    [
        ("DATABASE_URL", "postgres:evenkeel@db/evenkeel", "database", "write postgresql+asyncpg://USER:PASSWORD@HOST"),
        ("DATABASE_URL", "postgresql://evenkeel@db:port/evenkeel", "database", "is no database URL"),
        ("DATABASE_URL", "mysql://root@127.0.0.1/test", "database", "has the unknown scheme mysql: write postgresql"),
        ("URL", "http://127.0.0.1:99999", "service", "'http://127.0.0.1:99999' is not a usable address"),
        ("API_KEY", "clé", "service", "characters that are not allowed in keys"),
    ],
)
def test_a_variable_that_cannot_be_is_one_finding(
    variable: str, value: str, name: str, says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "check_load", tuple)
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 10**11)
    monkeypatch.setenv("EVENKEEL_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(f"EVENKEEL_{variable}", value)
    (found,) = (check for check in doctor.examine() if check.level == "fail")
    assert found.name == name
    assert says in found.message
    assert f"EVENKEEL_{variable}" in found.remedy


@pytest.mark.parametrize(
    ("installed", "level", "says"),
    [
        ({"fbgemm-gpu-cpu": "1.8.0"}, "ok", "fbgemm-gpu-cpu 1.8.0 with torch 2.13.0"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, "fail", "built for torch 2.12"),
        ({"fbgemm-gpu": "1.9.0"}, "fail", "built for torch 2.14"),
        ({"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, "fail", "overwrite each other"),
        ({}, "fail", "not installed"),
        ({"fbgemm-gpu-cpu": "2.0.0"}, "warn", "not a 1.X"),
        ({"fbgemm-gpu-cpu": "1.8.0", "torch": "2.1.0"}, "fail", "built for torch 2.13"),
    ],
)
def test_abi_pair(installed: dict[str, str], level: str, says: str):
    checks = {check.name: check for check in doctor.check_packages(versions(**(GOOD | installed)))}
    assert checks["abi"].level == level
    assert says in checks["abi"].message


def test_missing_packages_are_named():
    some = {name: version for name, version in GOOD.items() if name not in ("ray", "numpy")}
    checks = {check.name: check for check in doctor.check_packages(versions(**some))}
    assert checks["packages"] == Check("packages", "fail", "not installed: ray, numpy", "run `make setup`")


@pytest.mark.process
def test_load_is_tried_in_another_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_LOAD", "raise ImportError('undefined symbol: _ZN')")
    (check,) = doctor.check_load()
    assert check.level == "fail"
    assert "undefined symbol" in check.message
    monkeypatch.setattr(doctor, "_LOAD", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "LOAD_SECONDS", 1)
    (check,) = doctor.check_load()
    assert check.level == "warn"
    monkeypatch.setattr(doctor, "LOAD_SECONDS", 60)
    monkeypatch.setattr(doctor, "_LOAD", "print('[\"NVIDIA H200\"]')")
    assert [(check.name, check.level, check.message) for check in doctor.check_load()][1] == (
        "gpu",
        "ok",
        "NVIDIA H200",
    )


def test_memory_and_disk_thresholds(monkeypatch: pytest.MonkeyPatch):
    for name in ("MEMORY_WARN", "MEMORY_FAIL"):
        monkeypatch.setattr(doctor, f"{name}_BYTES", 1)  # whatever this machine has
    assert levels(doctor.check_memory())["memory"] == "ok"
    for name, check in (("MEMORY", doctor.check_memory), ("DISK", doctor.check_disk)):
        monkeypatch.setattr(doctor, f"{name}_WARN_BYTES", 10**18)
        assert [found.level for found in check()] == ["warn"]
        monkeypatch.setattr(doctor, f"{name}_FAIL_BYTES", 10**17)
        (found,) = check()
        assert found.level == "fail"
        assert found.remedy
    monkeypatch.setattr(doctor, "SHARED_MEMORY_WARN_BYTES", 10**18)
    assert levels(doctor.check_shared_memory())["shm"] == "warn"


def test_home_that_cannot_be_a_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("EVENKEEL_HOME", str(file / "home"))
    (check,) = doctor.check_disk()
    assert check.level == "fail"
    assert "EVENKEEL_HOME" in check.remedy


def test_service_up_and_its_key(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EVENKEEL_URL", served.url)
    found = {check.name: check for check in doctor.check_service()}
    assert (found["service"].level, found["key"].level) == ("ok", "fail")
    assert "admin.key" in found["key"].remedy
    monkeypatch.setenv("EVENKEEL_HOME", str(served.home))
    assert levels(doctor.check_service()) == {"service": "ok", "key": "ok"}


def test_port_free_or_taken_by_another(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("EVENKEEL_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert levels(doctor.check_service()) == {"port": "ok", "service": "warn"}
    monkeypatch.setenv("EVENKEEL_URL", "http://service.invalid:8080")
    assert levels(doctor.check_service()) == {"service": "fail"}


@contextlib.contextmanager
def answering(body: bytes) -> Iterator[str]:
    """The address of a web server that answers everything so."""

    class Program(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Program)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_port_with_another_web_server(monkeypatch: pytest.MonkeyPatch):
    with answering(b"<html>") as url:
        monkeypatch.setenv("EVENKEEL_URL", url)
        (check,) = doctor.check_service()
    assert (check.name, check.level) == ("port", "fail")
    assert "--port" in check.remedy


def test_a_service_whose_runner_fails(monkeypatch: pytest.MonkeyPatch):
    checks = {
        "database": "ok",
        "disk": "ok",
        "runner": "has been failing for 30 s: OSError: no space left",
        "scheduler": "ok",
    }
    with answering(json.dumps({"status": "degraded", "checks": checks, "items": []}).encode()) as url:
        monkeypatch.setenv("EVENKEEL_URL", url)
        check = next(iter(doctor.check_service()))
    assert (check.name, check.level) == ("service", "fail")
    assert check.message.endswith("answers, but runner has been failing for 30 s: OSError: no space left")


def test_ray(monkeypatch: pytest.MonkeyPatch):
    assert levels(doctor.check_executor()) == {"ray": "ok"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setenv("EVENKEEL_RAY_ADDRESS", f"127.0.0.1:{listener.getsockname()[1]}")
        (check,) = doctor.check_executor()
        assert check.level == "fail"
        assert "no Ray answers" in check.message
        listener.listen()
        (check,) = doctor.check_executor()
        assert check.level == "fail"
        assert "RAY_AUTH_MODE=token" in check.remedy
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert levels(doctor.check_executor()) == {"ray": "ok"}


def test_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def spec(**changes: Any) -> Path:
        file = tmp_path / "spec.yaml"
        file.write_text(yaml.safe_dump_all([serving.dataset(tmp_path), serving.job(**changes)]))
        return file

    assert levels(doctor.check_spec(spec())) == {"spec": "ok", "estimate": "ok"}
    assert levels(doctor.check_spec(spec(resources={"num_workers": 500}))) == {"spec": "fail"}
    assert levels(doctor.check_spec(spec(epohcs=1))) == {"spec": "fail"}
    assert levels(doctor.check_spec(tmp_path / "none.yaml")) == {"spec": "fail"}
    with monkeypatch.context() as patch:
        patch.setattr("trainer.sizing.gpus.machine_gpu_bytes", lambda: 10**6)
        (*_, check) = doctor.check_spec(spec(resources={"gpus_per_worker": 1}))
        assert (check.name, check.level) == ("estimate", "fail")
        assert "bytes of its GPU, which has 1,000,000" in check.message
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 10**6)
    (*_, check) = doctor.check_spec(spec())
    assert (check.name, check.level) == ("estimate", "fail")
    file = spec()
    (tmp_path / "clicks.parquet").unlink()
    assert levels(doctor.check_spec(file)) == {"spec": "ok", "estimate": "fail"}


@pytest.mark.process
def test_exit_code_and_text(tmp_path: Path):
    done = subprocess.run(
        [EVENKEEL, "doctor", str(tmp_path / "none.yaml")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "fail  spec" in done.stdout
    assert "remedy: " in done.stdout
    assert done.stderr == ""


@pytest.mark.process
def test_doctor_imports_no_torch():
    code = "import sys, service.ops.doctor; print([name for name in ('torch', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
