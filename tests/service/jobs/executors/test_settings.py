"""Which executor the settings ask for, what they refuse, and what the doctor says of them on a real cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.app import serve
from service.core.settings import Settings
from service.jobs.executors.choice import executor_of
from service.jobs.executors.local import LocalRuns
from service.jobs.executors.ray_api import ray_token
from service.jobs.executors.ray_jobs import RayJobs
from service.ops import doctor
from tests.outside_package import install

RAY = {"EVENKEEL_EXECUTOR": "ray_jobs", "EVENKEEL_RAY_ADDRESS": "http://head:8265"}
NO_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty home, and nothing that this machine may say of clusters."""
    for name in (*NO_TOKEN, *RAY, "EVENKEEL_INTERNAL_URL", "EVENKEEL_CLUSTER_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"EVENKEEL_EXECUTOR": "kubernetes"}, "EVENKEEL_EXECUTOR is 'kubernetes'"),
        ({"EVENKEEL_EXECUTOR": "ray_jobs"}, "http://HOST:8265"),
        ({"EVENKEEL_EXECUTOR": "ray_jobs", "EVENKEEL_RAY_ADDRESS": "head:6379"}, "http://HOST:8265"),
        ({"EVENKEEL_RAY_ADDRESS": "http://head:8265"}, "HOST:6379"),
        ({**RAY, "EVENKEEL_INTERNAL_URL": "http://api:8080"}, "go together"),
        ({**RAY, "EVENKEEL_CLUSTER_RUNS": "/runs"}, "go together"),
        ({**RAY, "EVENKEEL_CLUSTER_RUNS": "/runs", "EVENKEEL_INTERNAL_URL": "api:8080"}, "write http://HOST:PORT"),
        ({"EVENKEEL_CLUSTER_RUNS": "/runs", "EVENKEEL_INTERNAL_URL": "http://api"}, "need EVENKEEL_EXECUTOR=ray_jobs"),
        ({**RAY, "EVENKEEL_DRIVER_RESOURCES": "driver"}, "write NAME=NUMBER"),
        ({"EVENKEEL_DRIVER_RESOURCES": "driver=1"}, "need EVENKEEL_EXECUTOR=ray_jobs"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Settings.from_environment(given)


def test_a_cluster_that_shares_nothing() -> None:
    more = {"EVENKEEL_INTERNAL_URL": "http://api.internal:8080/", "EVENKEEL_CLUSTER_RUNS": "/cluster/runs"}
    settings = Settings.from_environment({**RAY, **more, "EVENKEEL_DRIVER_RESOURCES": "driver=0.01, big=1"})
    assert settings.internal_url == "http://api.internal:8080"
    assert settings.cluster_runs == Path("/cluster/runs")
    assert dict(settings.driver_resources) == {"driver": 0.01, "big": 1.0}
    assert "api.internal" in settings.allowed_hosts, "runs are let in by the name that they are given"


def test_the_executor_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(executor_of(Settings()), LocalRuns)
    settings = Settings.from_environment(RAY)
    with pytest.raises(ValueError, match="RAY_AUTH_TOKEN_PATH"):
        executor_of(settings)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert isinstance(executor_of(settings), RayJobs)


def test_a_service_without_the_token_says_so_and_does_not_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = Settings.from_environment({**RAY, "EVENKEEL_HOME": str(tmp_path / "home")})
    assert serve(settings, port=0) == 1
    assert "RAY_AUTH_TOKEN_PATH" in capsys.readouterr().err


def test_the_token_is_found_where_ray_looks(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert ray_token(home) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of the home\n")
    assert ray_token(home) == "of the home"
    (tmp_path / "file").write_text("of the file\n")
    path = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}
    assert ray_token(home | path) == "of the file"
    assert ray_token(home | path | {"RAY_AUTH_TOKEN": "itself"}) == "itself"
    assert ray_token(home | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nowhere")}) is None


def levels() -> list[tuple[str, str]]:
    return [(check.name, check.level) for check in doctor.check_ray()]


def test_the_doctor_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_EXECUTOR", "ray_jobs")
    (wrong,) = doctor.check_ray()
    assert wrong.level == "fail"
    assert "EVENKEEL_RAY_ADDRESS" in wrong.message
    monkeypatch.setenv("EVENKEEL_RAY_ADDRESS", "http://127.0.0.1:9")
    (wrong,) = doctor.check_ray()
    assert "token" in wrong.message
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    (wrong,) = doctor.check_ray()
    assert "does not answer" in wrong.message
    assert wrong.remedy


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_doctor_finds_a_cluster_well(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_EXECUTOR", "ray_jobs")
    monkeypatch.setenv("EVENKEEL_RAY_ADDRESS", ray_cluster.dashboard)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    assert levels() == [("executor", "fail")]
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster.token)
    found = list(doctor.check_ray())
    assert [check.name for check in found] == ["executor", "runs"]
    assert found[0].level in ("ok", "warn")  # what is free it tells some seconds after its start
    assert "share EVENKEEL_HOME" in found[1].message


def test_another_package_enters_an_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "class Mine:\n    def __init__(self, settings):\n        self.home = settings.home\n"
    install(tmp_path, "my_runs", code, {"evenkeel.executors": {"mine": "my_runs:Mine"}})
    with pytest.raises(ValueError, match="EVENKEEL_EXECUTOR is 'mine': set it to local or ray_jobs"):
        Settings.from_environment({"EVENKEEL_EXECUTOR": "mine"})
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings.from_environment({"EVENKEEL_EXECUTOR": "mine", "EVENKEEL_HOME": str(tmp_path / "home")})
    made: Any = executor_of(settings)
    assert (type(made).__name__, made.home) == ("Mine", settings.home)


def test_an_executor_that_cannot_be_imported_stops_the_service_that_asks_for_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "cut_runs", "import no_such_module\n", {"evenkeel.executors": {"cut": "cut_runs:Cut"}})
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(executor_of(Settings.from_environment({})), LocalRuns)
    settings = Settings.from_environment({"EVENKEEL_EXECUTOR": "cut", "EVENKEEL_HOME": str(tmp_path / "home")})
    assert serve(settings, port=0) == 1
    said = capsys.readouterr().err
    assert "evenkeel: 'cut' of package cut_runs cannot be imported" in said
    assert "`pip uninstall cut_runs`" in said
