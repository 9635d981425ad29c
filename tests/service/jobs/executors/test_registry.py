"""Which executor the settings ask for, what they refuse, and what the doctor says of them on a real cluster."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from service.app import serve
from service.core.settings import Settings
from service.jobs.executors.base import Placement
from service.jobs.executors.local import LocalRuns
from service.jobs.executors.ray_jobs import RayApi, RayJobs, ray_token
from service.jobs.executors.registry import executor_class, executor_of, placement_of
from service.ops import doctor
from tests.support.outside_package import install
from trainer.runs.directory import THIS_CLUSTER
from trainer.runs.protocol import EXIT_ENVIRONMENT
from trainer.sizing.memory import machine_memory_bytes
from trainer.spec import JobSpec

RAY = {"EVENKEEL_EXECUTOR": "ray_jobs", "EVENKEEL_RAY_ADDRESS": "http://head:8265"}
NO_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty home, and nothing that this machine may say of clusters."""
    for name in (*NO_TOKEN, *RAY, "EVENKEEL_INTERNAL_URL", "EVENKEEL_RUN_STORAGE"):
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
        ({**RAY, "EVENKEEL_RUN_STORAGE": "/runs"}, "go together"),
        ({**RAY, "EVENKEEL_RUN_STORAGE": "/runs", "EVENKEEL_INTERNAL_URL": "api:8080"}, "write http://HOST:PORT"),
        (
            {**RAY, "EVENKEEL_RUN_STORAGE": "runs", "EVENKEEL_INTERNAL_URL": "http://api"},
            "a directory must be an absolute path",
        ),
        ({"EVENKEEL_RUN_STORAGE": "/runs"}, "needs EVENKEEL_EXECUTOR=ray_jobs"),
        ({"EVENKEEL_INTERNAL_URL": "http://api"}, "needs EVENKEEL_EXECUTOR=ray_jobs"),
        (
            {"EVENKEEL_RUN_STORAGE": "ftp://host/runs"},
            "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///DIRECTORY",
        ),
        ({"EVENKEEL_CLUSTER_RUNS": "/runs"}, "EVENKEEL_CLUSTER_RUNS was renamed: set EVENKEEL_RUN_STORAGE to the same"),
        ({**RAY, "EVENKEEL_DRIVER_RESOURCES": "driver"}, "write NAME=NUMBER"),
        (
            {"EVENKEEL_DRIVER_RESOURCES": "driver=1"},
            "DRIVER_RESOURCES is not read by local: needs EVENKEEL_EXECUTOR=ray_",
        ),
        ({**RAY, "EVENKEEL_RAY_JOBS_QUEUE": "x"}, "reads nothing that begins with EVENKEEL_RAY_JOBS_"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        executor_class(Settings.from_environment(given))


def test_a_cluster_that_shares_nothing() -> None:
    more = {"EVENKEEL_INTERNAL_URL": "http://api.internal:8080/", "EVENKEEL_RUN_STORAGE": "/cluster/runs"}
    settings = Settings.from_environment({**RAY, **more, "EVENKEEL_DRIVER_RESOURCES": "driver=0.01, big=1"})
    assert settings.internal_url == "http://api.internal:8080"
    assert settings.shared_runs == Path("/cluster/runs")
    assert settings.stored_runs is None
    assert dict(settings.driver_resources) == {"driver": 0.01, "big": 1.0}
    assert "api.internal" in settings.allowed_hosts, "runs are let in by the name that they are given"


def test_a_run_with_a_storage_is_submitted_without_a_directory(tmp_path: Path) -> None:
    """The host that the cluster chooses has one of its own."""
    executor = RayJobs(RayApi("http://head:8265", "token"), 5)
    submission = executor._submission("run-1", tmp_path, {"run_id": "run", "attempt": 1, "storage": "s3://bucket/run"})
    assert submission["entrypoint"].endswith(" || exit 78; exec python -m trainer.launch.entrypoint")
    assert "EVENKEEL_RUN_DIR" not in submission["runtime_env"]["env_vars"]
    assert submission["runtime_env"]["env_vars"]["EVENKEEL_RUN_ID"] == "run"


@pytest.mark.process
def test_a_python_of_another_environment_ends_before_the_run_begins(tmp_path: Path) -> None:
    def submitted(python: str) -> subprocess.CompletedProcess[str]:
        executor = RayJobs(RayApi("http://head:8265", "token"), 5, entrypoint=(python, "-c", "print('begun')"))
        command = executor._submission("run-1", tmp_path, {"run_id": "run", "attempt": 1})["entrypoint"]
        return subprocess.run(
            ["sh", "-c", command],
            env={"PATH": "/usr/bin:/bin"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    done = submitted(str(other / "bin" / "python"))
    assert (done.returncode, done.stdout) == (EXIT_ENVIRONMENT, "")
    assert done.stderr.strip().endswith("lacks trainer, torch, ray")
    assert submitted("/nowhere/python").returncode == EXIT_ENVIRONMENT
    done = submitted(sys.executable)
    assert (done.returncode, done.stdout) == (0, "begun\n")


def test_a_storage_of_objects() -> None:
    settings = Settings.from_environment({"EVENKEEL_RUN_STORAGE": "s3://bucket/runs/"})
    assert settings.stored_runs == "s3://bucket/runs"
    assert settings.shared_runs is None


def test_the_executor_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(executor_of(Settings()), LocalRuns)
    settings = Settings.from_environment(RAY)
    with pytest.raises(ValueError, match="RAY_AUTH_TOKEN_PATH"):
        executor_of(settings)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert isinstance(executor_of(settings), RayJobs)


@pytest.mark.parametrize(
    ("given", "placement"),
    [
        ({}, Placement(uses_this_host=True)),
        ({"EVENKEEL_RAY_ADDRESS": "head:6379"}, Placement(uses_this_host=False, ray_address="head:6379")),
        (RAY, Placement(uses_this_host=False, ray_address=THIS_CLUSTER)),
    ],
)
def test_where_runs_are(given: dict[str, str], placement: Placement) -> None:
    assert placement_of(Settings.from_environment(given)) == placement


def test_what_is_known_of_the_machines() -> None:
    job = JobSpec.model_validate(
        {"name": "job", "dataset": {"name": "log"}, "model": {"kind": "dnn"}, "resources": {"gpus_per_worker": 1}}
    )
    here, there = Placement(uses_this_host=True), Placement(uses_this_host=False, ray_address="127.0.0.1:1")
    assert here.memory_bytes() == machine_memory_bytes()
    assert there.memory_bytes() is there.gpu_bytes(job) is None
    problem = there.gpu_problem(job)
    assert problem is not None
    assert "no Ray cluster answers at 127.0.0.1:1" in problem[0]
    for address in (None, THIS_CLUSTER):
        assert Placement(uses_this_host=False, ray_address=address).gpu_problem(job) is None, "the run itself asks"


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
    return [(check.name, check.level) for check in doctor.check_executor()]


def test_the_doctor_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_EXECUTOR", "ray_jobs")
    (wrong,) = doctor.check_executor()
    assert wrong.level == "fail"
    assert "EVENKEEL_RAY_ADDRESS" in wrong.message
    monkeypatch.setenv("EVENKEEL_RAY_ADDRESS", "http://127.0.0.1:9")
    (wrong,) = doctor.check_executor()
    assert "token" in wrong.message
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    (wrong,) = doctor.check_executor()
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
    found = list(doctor.check_executor())
    assert [check.name for check in found] == ["executor", "runs"]
    assert found[0].level in ("ok", "warn")  # what is free it tells some seconds after its start
    assert "share EVENKEEL_HOME" in found[1].message


OUTSIDE = """
from service.jobs.executors.base import Check
from service.jobs.executors.base import Executor
from service.jobs.executors.base import Placement

class Mine(Executor):
    settings_read = ("internal_url", "shared_runs", "stored_runs")
    options = {"QUEUE": "the queue that runs wait in"}

    def __init__(self, queue):
        self.queue = queue

    @classmethod
    def from_settings(cls, settings):
        return cls(dict(settings.executor_options)["QUEUE"])

    @classmethod
    def placement(cls, settings):
        return Placement(uses_this_host=False)

    @classmethod
    def check_settings(cls, settings):
        if not settings.executor_options:
            raise ValueError("EVENKEEL_MINE_QUEUE is not set: set it to the queue that runs wait in")

    @classmethod
    def diagnose(cls, settings):
        yield Check("executor", "ok", "the queue answers")

    launch = is_alive = terminate = close = None
"""


def test_another_package_enters_an_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "my_runs", OUTSIDE, {"evenkeel.executors": {"mine": "my_runs:Mine"}})
    mine = {"EVENKEEL_EXECUTOR": "mine", "EVENKEEL_HOME": str(tmp_path / "home")}
    with pytest.raises(ValueError, match="EVENKEEL_EXECUTOR is 'mine': set it to local or ray_jobs"):
        executor_class(Settings.from_environment(mine))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="EVENKEEL_MINE_QUEUE is not set"):
        executor_class(Settings.from_environment(mine))
    with pytest.raises(ValueError, match="EVENKEEL_MINE_QUEU is not known: mine reads EVENKEEL_MINE_QUEUE"):
        executor_class(Settings.from_environment({**mine, "EVENKEEL_MINE_QUEU": "night"}))
    with pytest.raises(ValueError, match="EVENKEEL_RAY_ADDRESS is not read by mine"):
        executor_class(Settings.from_environment({**mine, "EVENKEEL_RAY_ADDRESS": "head:6379"}))
    mine["EVENKEEL_MINE_QUEUE"] = " night "
    made: Any = executor_of(Settings.from_environment(mine))
    assert (type(made).__name__, made.queue) == ("Mine", "night")
    assert not placement_of(Settings.from_environment(mine)).uses_this_host
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    assert [check.message for check in doctor.check_executor()] == ["the queue answers"]


def test_an_executor_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "no_runs", "class Mine: pass\n", {"evenkeel.executors": {"none": "no_runs:Mine"}})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'no_runs.Mine'> is not a subclass of service.jobs.executors.base.Executor"):
        executor_class(Settings.from_environment({"EVENKEEL_EXECUTOR": "none"}))


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
