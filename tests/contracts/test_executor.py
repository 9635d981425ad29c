"""One contract for whatever runs runs: processes of this host, jobs of a real Ray cluster with a second node, RayJobs.

RayJobs run on an API server of the tests' own (tests.kube), with real processes for drivers.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.core.errors import Problem
from service.jobs.executors.base import Executor, ExecutorUnavailable
from service.jobs.executors.local import LocalRuns
from service.jobs.executors.ray_jobs import JOB_FILE, RayApi, RayJobs
from tests.support.ray_cluster import Cluster
from trainer.runs import run_process
from trainer.runs.protocol import LOG_FILE

pytestmark = pytest.mark.process

COMMAND = (sys.executable, str(Path(__file__).with_name("stand_in_run.py")))
GRACE_SECONDS = 60.0
"""What a polite process has, however busy the machine is."""
SHORT_GRACE_SECONDS = 1.0

LOCAL = pytest.param("local", id="local")
KUBERAY = pytest.param("kuberay", id="kuberay")
RAY = pytest.param("ray", id="ray_jobs", marks=[pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.fixture(params=[LOCAL, KUBERAY, RAY])
def make(request: pytest.FixtureRequest) -> Callable[..., Executor]:
    """Makes an executor; each is like that of a service that was started again."""
    if request.param == "local":
        return lambda grace_seconds=GRACE_SECONDS: LocalRuns(COMMAND)
    if request.param == "kuberay":
        kubernetes = request.getfixturevalue("kubernetes")
        return lambda grace_seconds=GRACE_SECONDS: kubernetes.executor(grace_seconds, COMMAND)
    cluster = request.getfixturevalue("ray_cluster")
    return lambda grace_seconds=GRACE_SECONDS: ray_jobs(cluster, grace_seconds)


def ray_jobs(cluster: Any, grace_seconds: float = GRACE_SECONDS, **changes: Any) -> RayJobs:
    options: dict[str, Any] = {"entrypoint": COMMAND, **changes}
    return RayJobs(RayApi(cluster.dashboard, cluster.token), grace_seconds, **options)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / f"run_{uuid.uuid4().hex[:12]}"


def prepare(run_dir: Path, behave: str, attempt: int = 1) -> Path:
    run_dir.mkdir(exist_ok=True)
    for name in ("begun", "exit.json"):
        (run_dir / name).unlink(missing_ok=True)
    (run_dir / "run.json").write_text(json.dumps({"run_id": run_dir.name, "attempt": attempt, "behave": behave}))
    return run_dir


def until(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not seen within {seconds} s"
        time.sleep(0.05)


def begun(executor: Executor, run_dir: Path) -> None:
    until((run_dir / "begun").exists)
    assert executor.is_alive(run_dir)


def said(run_dir: Path) -> str:
    path = run_dir / LOG_FILE
    return path.read_text() if path.exists() else ""


def processes_of(run_dir: Path) -> list[psutil.Process]:
    return run_process.processes(run_dir)


def test_one_that_ends_by_itself(make, run_dir):
    executor = make()
    assert not executor.is_alive(prepare(run_dir, "end"))
    executor.launch(run_dir)
    until(lambda: not executor.is_alive(run_dir))
    assert json.loads((run_dir / "exit.json").read_text())["code"] == 0
    log = said(run_dir)
    assert log.count(f"attempt 1 of {run_dir.name} begins") == 1
    assert log.count("the last line") == 1
    assert not executor.is_alive(run_dir), "and its log is not told twice"
    assert said(run_dir) == log
    assert executor.terminate(run_dir, grace_seconds=0) is True
    # The next attempt of the same directory: its own submission, its lines after those of the first.
    executor.launch(prepare(run_dir, "fail", attempt=2))
    until(lambda: not executor.is_alive(run_dir))
    assert json.loads((run_dir / "exit.json").read_text()) == {"code": 1, "attempt": 2}
    assert executor.exit_code(run_dir) == (1 if isinstance(executor, RayJobs) else None)
    assert said(run_dir).startswith(log)
    assert said(run_dir).count(f"attempt 2 of {run_dir.name} begins") == 1
    until(lambda: processes_of(run_dir) == [])


def test_one_that_is_asked_ends_itself(make, run_dir):
    """Launched by one service, found and ended by the next."""
    executor = make()
    executor.launch(prepare(run_dir, "wait"))
    begun(executor, run_dir)
    with pytest.raises(RuntimeError, match="still running"):
        executor.launch(run_dir)
    executor.close()
    later = make()
    assert later.is_alive(run_dir)
    until(lambda: later.is_alive(run_dir) and "begins" in said(run_dir))
    assert later.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    assert json.loads((run_dir / "exit.json").read_text())["code"] == 130
    assert said(run_dir).count("stopped politely") == 1
    assert said(run_dir).count("begins") == 1
    for one in (executor, later):
        assert not one.is_alive(run_dir)
        assert one.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    until(lambda: processes_of(run_dir) == [])


def test_one_that_does_not_listen_is_forced_and_its_children_too(make, run_dir):
    executor = make(SHORT_GRACE_SECONDS)
    executor.launch(prepare(run_dir, "stubborn"))
    begun(executor, run_dir)
    until(lambda: len(processes_of(run_dir)) >= 2)
    assert executor.terminate(run_dir, grace_seconds=SHORT_GRACE_SECONDS) is False
    assert not executor.is_alive(run_dir)
    assert not (run_dir / "exit.json").exists()
    until(lambda: processes_of(run_dir) == [])


def test_one_that_died_without_a_word(make, run_dir):
    executor = make()
    executor.launch(prepare(run_dir, "die"))
    until(lambda: not executor.is_alive(run_dir))
    assert not (run_dir / "exit.json").exists()
    assert "begins" in said(run_dir)
    assert executor.terminate(run_dir, grace_seconds=0) is True


def test_one_that_never_was(make, run_dir):
    executor = make()
    assert not executor.is_alive(prepare(run_dir, "end"))
    assert executor.terminate(run_dir, grace_seconds=0) is True


def test_one_that_was_only_just_launched_is_ended(make, run_dir):
    executor = make()
    executor.launch(prepare(run_dir, "wait"))
    executor.terminate(run_dir, grace_seconds=GRACE_SECONDS)
    assert not executor.is_alive(run_dir)
    until(lambda: processes_of(run_dir) == [])


# --- what only a cluster knows ---------------------------------------------------------------------------------------


def ray(test: Any) -> Any:
    return pytest.mark.ray(pytest.mark.slow(pytest.mark.timeout(900)(test)))


@ray
def test_one_that_waits_for_its_turn_is_ended_before_it_begins(ray_cluster, run_dir):
    executor = ray_jobs(ray_cluster, resources={"no_such_thing": 1})
    submission_id = executor.launch(prepare(run_dir, "wait"))
    api = RayApi(ray_cluster.dashboard, ray_cluster.token)
    assert executor.is_alive(run_dir)
    assert executor.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    # Ray neither stops nor deletes what has not begun. It counts as ended, and would be ended as soon as it began.
    assert api.job(submission_id)["status"] == "PENDING"
    assert not executor.is_alive(run_dir)
    assert executor.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    assert not (run_dir / "begun").exists()
    # And it keeps nobody from being launched in its place.
    other = ray_jobs(ray_cluster)
    other.launch(prepare(run_dir, "end", attempt=2))
    until(lambda: not other.is_alive(run_dir))
    assert (run_dir / "exit.json").exists()


@ray
def test_a_submission_whose_answer_was_lost_is_found_again(ray_cluster, run_dir):
    class Deaf(RayApi):
        def submit(self, document):
            super().submit(document)
            raise ExecutorUnavailable("the answer was lost")

    executor = RayJobs(Deaf(ray_cluster.dashboard, ray_cluster.token), GRACE_SECONDS, entrypoint=COMMAND)
    submission_id = executor.launch(prepare(run_dir, "end"))
    assert submission_id == f"{run_dir.name}-1"
    until(lambda: not executor.is_alive(run_dir))
    assert said(run_dir).count("begins") == 1
    # The same attempt once more, as after a crash between submission and commit: it is recognised, and not run again.
    (run_dir / JOB_FILE).unlink()
    assert ray_jobs(ray_cluster).launch(run_dir) == submission_id
    assert not executor.is_alive(run_dir)
    assert (run_dir / "exit.json").exists()


def test_a_cluster_that_does_not_answer_says_nothing_of_the_run(run_dir):
    executor = RayJobs(RayApi("http://127.0.0.1:9", "secret"), GRACE_SECONDS)
    prepare(run_dir, "wait")
    with pytest.raises(ExecutorUnavailable, match="does not answer"):
        executor.launch(run_dir)
    (run_dir / JOB_FILE).write_text(json.dumps({"submission_id": "a-1", "log_bytes": 0, "asked_to_stop": False}))
    for ask in (executor.is_alive, lambda path: executor.terminate(path, grace_seconds=0)):
        with pytest.raises(ExecutorUnavailable, match="does not answer"):
            ask(run_dir)


@ray
def test_a_wrong_token_says_nothing_of_the_run_either(ray_cluster, run_dir):
    executor = RayJobs(RayApi(ray_cluster.dashboard, "0" * 64), GRACE_SECONDS, entrypoint=COMMAND)
    with pytest.raises(ExecutorUnavailable, match=r"does not accept our token.*RAY_AUTH_TOKEN_PATH"):
        executor.launch(prepare(run_dir, "end"))
    assert not (run_dir / "begun").exists()


@ray
def test_the_cluster_says_what_is_free(ray_cluster):
    api = RayApi(ray_cluster.dashboard, ray_cluster.token)
    until(lambda: api.room() is not None and len(api.room()) == 2)
    head, node = sorted(api.room())
    assert (head.cpus, head.gpus, node.gpus) == (0, 0, 0)
    assert node.cpus <= 2
    assert node.memory_bytes > 0


@ray
def test_nobody_submits_without_the_token(ray_cluster):
    """Started as every launcher of ours does it, with an empty home."""
    answer = httpx.post(f"{ray_cluster.dashboard}/api/jobs/", json={"entrypoint": "true"}, trust_env=False)
    assert answer.status_code == 401


@ray
def test_nothing_is_submitted_to_a_cluster_without_a_token(run_dir):
    """What ``ray start`` makes of a fresh machine."""
    cluster = Cluster(token=None)
    try:
        cluster.start_head()
        executor = RayJobs(RayApi(cluster.dashboard, "any"), GRACE_SECONDS, entrypoint=COMMAND)
        with pytest.raises(Problem) as refusal:
            executor.launch(prepare(run_dir, "end"))
    finally:
        cluster.stop()
    assert refusal.value.code == "open-cluster"
    assert "RAY_AUTH_MODE=token" in refusal.value.errors[0]["remedy"]
    assert not (run_dir / JOB_FILE).exists()
