"""RayJobs when the API server fails, by each failure that it has; who owns objects; what a service finds again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.core.errors import Problem
from service.core.settings import Settings
from service.jobs.executors import kube_api
from service.jobs.executors.base import ExecutorUnavailable
from service.jobs.executors.kuberay import KubeRayJobs, Position, fresh_lines
from service.jobs.executors.ray_job_manifest import ClusterTemplate, labels_of, object_name, ray_job, token_secret
from service.jobs.executors.registry import executor_of
from service.ops import doctor
from tests.kube import schemas
from tests.kube.api_server import NAMESPACE, TOKEN, Fault
from tests.kube.fixtures import KubeCluster, cluster_template, kube_cluster
from trainer.runs.protocol import LOG_FILE

pytestmark = pytest.mark.process

STAND_IN = Path(__file__).resolve().parents[3] / "contracts" / "stand_in_run.py"
COMMAND = (sys.executable, str(STAND_IN))
GRACE_SECONDS = 60.0


@pytest.fixture
def cluster() -> Iterator[KubeCluster]:
    with kube_cluster() as found:
        yield found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return prepare(tmp_path / "job_01k0abcdefg", "wait")


def prepare(run_dir: Path, behave: str, attempt: int = 1, **more: Any) -> Path:
    run_dir.mkdir(exist_ok=True)
    run = {"run_id": run_dir.name, "attempt": attempt, "behave": behave, "lease": {"token": "lease-1"}, **more}
    (run_dir / "run.json").write_text(json.dumps(run))
    return run_dir


def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not seen within {seconds} s"
        time.sleep(0.05)


def said(run_dir: Path) -> str:
    path = run_dir / LOG_FILE
    return path.read_text() if path.exists() else ""


def state_of(cluster: KubeCluster, name: str) -> str:
    found = cluster.api.get("rayjobs", name)
    return "" if found is None else found.get("status", {}).get("jobDeploymentStatus", "")


# --- the life of a run ---


def test_objects_carry_their_owner_and_the_token_is_in_a_secret_of_its_own(cluster: KubeCluster, run_dir: Path) -> None:
    report = {"url": "http://api:8080/internal/runs/x", "token": "the-token-of-this-attempt"}
    prepare(run_dir, "end", attempt=3, report=report)
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    name = executor.launch(run_dir)
    assert name == "job-01k0abcdefg-3"
    until(lambda: state_of(cluster, name) == "Complete")
    owner = {"evenkeel.io/run": run_dir.name, "evenkeel.io/attempt": "3", "app.kubernetes.io/managed-by": "evenkeel"}
    for resource in ("rayjobs", "rayclusters", "secrets"):
        (found,) = cluster.api.list(resource)
        assert owner.items() <= found["metadata"]["labels"].items()
        assert "lease-1" not in json.dumps(found), "the fence does not tell the lease"
        assert (report["token"] in json.dumps(found)) is (resource == "secrets")
    (secret,) = cluster.api.list("secrets")
    assert secret["metadata"]["ownerReferences"][0]["name"] == name
    spec = cluster.api.list("rayjobs")[0]["spec"]
    assert (spec["submissionMode"], spec["backoffLimit"], spec["submitterConfig"]) == (
        "K8sJobMode",
        0,
        {"backoffLimit": 0},
    )
    assert (spec["shutdownAfterJobFinishes"], spec["suspend"]) == (True, False)
    roles = sorted(pod["metadata"]["labels"]["evenkeel.io/role"] for pod in cluster.api.list("pods"))
    assert roles == ["head", "submitter", "worker"]
    assert executor.is_alive(run_dir) is False
    assert executor.terminate(run_dir, grace_seconds=0) is True
    assert cluster.api.objects == {}, "nothing is left"


def test_a_pod_tells_its_run_before_it_ends_and_fewer_workers_are_fewer_pods() -> None:
    resources = {"num_workers": 4, "min_workers": 2}
    run = {"run_id": "job", "job": {"resources": resources}, "workers": {"number": 3, "because": "no room"}}
    template = cluster_template()
    template["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    spec = ray_job(run, Path("/runs/job"), ClusterTemplate(template), 60.0)["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 2, 3)
    for pod, seconds in ((spec["headGroupSpec"]["template"]["spec"], 5), (group["template"]["spec"], 70)):
        assert pod["terminationGracePeriodSeconds"] == seconds
        told = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert told == ["python", "-m", "trainer.runs.preemption"]


def test_the_driver_has_the_token_from_its_secret(cluster: KubeCluster, run_dir: Path) -> None:
    report = {"url": "http://api:8080/internal/runs/x", "token": "the-token-of-this-attempt"}
    prepare(run_dir, "end", report=report)
    show = (sys.executable, "-c", "import os; print(os.environ['EVENKEEL_RUN_URL'], os.environ['EVENKEEL_RUN_TOKEN'])")
    executor = cluster.executor(GRACE_SECONDS, show)
    executor.launch(run_dir)
    until(lambda: not executor.is_alive(run_dir))
    assert said(run_dir) == f"{report['url']} {report['token']}\n"


def test_one_that_waits_for_a_place_is_alive_and_ended_before_it_begins(cluster: KubeCluster, run_dir: Path) -> None:
    cluster.operator.admit = False
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    executor.launch(run_dir)
    until(lambda: len(cluster.api.list("pods")) == 2)
    assert executor.is_alive(run_dir)
    assert executor.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    assert cluster.api.objects == {}
    assert not (run_dir / "begun").exists()


def test_a_queue_decides_when_a_run_starts(cluster: KubeCluster, run_dir: Path) -> None:
    executor = cluster.executor(GRACE_SECONDS, COMMAND, queue="training")
    name = executor.launch(prepare(run_dir, "end"))
    assert cluster.api.get("rayjobs", name)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    until(lambda: state_of(cluster, name) == "Suspended")
    assert executor.is_alive(run_dir)
    assert cluster.api.list("pods") == []
    cluster.api.change("rayjobs", name, {"spec": {"suspend": False}})  # as Kueue does
    until(lambda: not executor.is_alive(run_dir))
    assert "the last line" in said(run_dir)


def test_a_run_is_suspended_and_goes_on(cluster: KubeCluster, run_dir: Path) -> None:
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    name = executor.launch(run_dir)
    until((run_dir / "begun").exists)
    cluster.api.change("rayjobs", name, {"spec": {"suspend": True}})
    until(lambda: state_of(cluster, name) == "Suspended" and not cluster.api.list("pods"))
    assert executor.is_alive(run_dir), "it waits"
    (run_dir / "begun").unlink()
    cluster.api.change("rayjobs", name, {"spec": {"suspend": False}})
    until((run_dir / "begun").exists)
    assert executor.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True


def test_a_run_whose_service_lost_its_files_is_found_by_its_labels(cluster: KubeCluster, run_dir: Path) -> None:
    cluster.executor(GRACE_SECONDS, COMMAND).launch(run_dir)
    until((run_dir / "begun").exists)
    for file in ("kuberay.json", "run.json"):
        (run_dir / file).unlink()
    later = cluster.executor(GRACE_SECONDS, COMMAND)
    assert later.is_alive(run_dir)
    assert later.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    assert cluster.api.objects == {}


def test_a_service_that_died_while_it_ended_a_run_ends_it_the_next_time(cluster: KubeCluster, run_dir: Path) -> None:
    """Its RayJob is deleted, the cluster with the run is not yet."""
    cluster.executor(GRACE_SECONDS, COMMAND).launch(prepare(run_dir, "stubborn"))
    until((run_dir / "begun").exists)
    cluster.api.delete("rayjobs", "job-01k0abcdefg-1", "Orphan")
    until(lambda: not cluster.api.list("rayjobs"))
    later = cluster.executor(GRACE_SECONDS, COMMAND)
    assert later.is_alive(run_dir)
    assert later.terminate(run_dir, grace_seconds=0.1) is False
    assert cluster.api.objects == {}


def test_kuberay_is_away_when_a_run_is_ended(
    cluster: KubeCluster, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.executors.kuberay.GONE_SECONDS", 0.5)
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    executor.launch(run_dir)
    until((run_dir / "begun").exists)
    cluster.operator.paused = True
    with pytest.raises(RuntimeError, match="long after"):
        executor.terminate(run_dir, grace_seconds=0.1)
    assert cluster.api.list("pods") == [], "they are killed all the same"
    assert not executor.is_alive(run_dir)
    cluster.operator.paused = False
    until(lambda: executor.terminate(run_dir, grace_seconds=0) and cluster.api.objects == {})


def test_what_kuberay_refuses_is_told_in_the_log(cluster: KubeCluster, run_dir: Path) -> None:
    cluster.operator.refusal = "The RayJob spec is invalid: no head"
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    executor.launch(run_dir)
    until(lambda: not executor.is_alive(run_dir))
    assert said(run_dir) == "KubeRay: ValidationFailed: The RayJob spec is invalid: no head\n"
    assert not executor.is_alive(run_dir)
    assert said(run_dir).count("KubeRay") == 1


def test_the_same_attempt_is_launched_once(cluster: KubeCluster, run_dir: Path) -> None:
    """After a crash between the request and the commit, and the end of the run."""
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    name = executor.launch(prepare(run_dir, "end"))
    until(lambda: not executor.is_alive(run_dir))
    (run_dir / "kuberay.json").unlink()
    (run_dir / "begun").unlink()
    assert cluster.executor(GRACE_SECONDS, COMMAND).launch(run_dir) == name
    assert not executor.is_alive(run_dir)
    assert not (run_dir / "begun").exists()


def test_an_object_of_another_lease_is_not_taken_for_ours(cluster: KubeCluster, run_dir: Path) -> None:
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    executor.launch(prepare(run_dir, "end"))
    until(lambda: not executor.is_alive(run_dir))
    with pytest.raises(RuntimeError, match="belongs to another service"):
        executor.launch(prepare(run_dir, "end", lease={"token": "lease-2"}))


def test_the_role_of_the_chart_allows_what_is_asked(cluster: KubeCluster, run_dir: Path) -> None:
    """Each request of a whole life is of a verb that the chart's Role has for its resource."""
    prepare(run_dir, "wait", report={"url": "http://api:8080", "token": "token"})
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    executor.launch(run_dir)
    until((run_dir / "begun").exists)
    executor.terminate(run_dir, grace_seconds=GRACE_SECONDS)
    text = (Path(__file__).resolve().parents[4] / "deploy/helm/evenkeel/templates/runs.yaml").read_text()
    allowed = {}
    for line in text.splitlines():
        if "apiGroups" in line and "verbs" in line:
            resource = line.split("resources: [")[1].split("]")[0]
            allowed[resource] = set(line.split("verbs: [")[1].split("]")[0].split(", "))
    verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "WATCH": "watch"}
    for method, resource in cluster.api.requests:
        assert verbs.get(method, "get") in allowed[resource] or (method == "GET" and "list" in allowed[resource])


# --- the API server fails ---


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            Fault("GET", "rayjobs", 401, message="Unauthorized"),
            "answers GET .* with 401: Unauthorized.*Role of the Helm",
        ),
        (Fault("GET", "rayjobs", 403, message="rayjobs is forbidden"), "403: rayjobs is forbidden.*KUBECONFIG"),
        (Fault("GET", "rayjobs", 410, message="continue expired"), "could not finish a list.*410"),
        (Fault("GET", "rayjobs", 500, message="etcd is gone"), "500: etcd is gone"),
        (Fault("GET", "rayjobs", 503, message="starting"), "503: starting"),
        (Fault("GET", "rayjobs", how="cut"), "does not answer GET"),
        (Fault("GET", "rayjobs", how="hang"), "does not answer GET.*timed out"),
    ],
    ids=["401", "403", "410", "500", "503", "cut", "timeout"],
)
def test_a_server_that_fails_says_nothing_of_the_run(
    cluster: KubeCluster, run_dir: Path, fault: Fault, says: str
) -> None:
    executor = cluster.executor(GRACE_SECONDS, COMMAND, client=cluster.client(answer_seconds=1.0))
    fault.times = 3
    cluster.api.faults = [fault]
    for ask in (executor.is_alive, executor.launch, lambda path: executor.terminate(path, grace_seconds=0)):
        with pytest.raises(ExecutorUnavailable, match=says):
            ask(run_dir)
    assert cluster.api.objects == {}, "nothing was made"
    assert executor.is_alive(run_dir) is False, "and it answers again"


def test_a_server_that_is_not_there_says_nothing_of_the_run(run_dir: Path) -> None:
    with kube_cluster() as cluster:
        executor = cluster.executor(GRACE_SECONDS, COMMAND)
    with pytest.raises(ExecutorUnavailable, match="does not answer"):
        executor.is_alive(run_dir)


def test_a_wrong_token_and_a_wrong_namespace(cluster: KubeCluster, run_dir: Path) -> None:
    for client, status in ((cluster.client(token="wrong"), 401), (cluster.client(namespace="other"), 403)):
        executor = cluster.executor(GRACE_SECONDS, COMMAND, client=client)
        with pytest.raises(ExecutorUnavailable, match=f"{status}.*Role of the Helm chart"):
            executor.launch(run_dir)


def test_a_cluster_without_kuberay(cluster: KubeCluster, run_dir: Path) -> None:
    cluster.api.missing.add("rayjobs")
    with pytest.raises(ExecutorUnavailable, match="has no rayjobs: install the KubeRay operator"):
        cluster.executor(GRACE_SECONDS, COMMAND).launch(run_dir)


def test_a_server_that_asks_for_patience_is_given_it(cluster: KubeCluster, run_dir: Path) -> None:
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    cluster.api.faults = [Fault("GET", "rayjobs", 429, headers={"Retry-After": "1"}, message="too many requests")]
    with pytest.raises(ExecutorUnavailable, match="429: too many requests"):
        executor.is_alive(run_dir)
    asked = len(cluster.api.requests)
    with pytest.raises(ExecutorUnavailable, match=r"asks to wait for .* s"):
        executor.is_alive(run_dir)
    assert len(cluster.api.requests) == asked, "it is not asked"

    def answers() -> bool:
        try:
            return executor.is_alive(run_dir) is False
        except ExecutorUnavailable:
            return False

    until(answers)


@pytest.mark.parametrize("how", ["cut", "answer"])
def test_a_launch_whose_answer_was_lost_is_found(cluster: KubeCluster, run_dir: Path, how: str) -> None:
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    cluster.api.faults = [Fault("POST", "rayjobs", 500, how=how, after=True)]
    name = executor.launch(prepare(run_dir, "end"))
    assert cluster.api.requests.count(("POST", "rayjobs")) == 1
    until(lambda: not executor.is_alive(run_dir))
    assert said(run_dir).count("begins") == 1
    assert state_of(cluster, name) == "Complete"


def test_a_launch_that_did_not_arrive_is_made_the_next_time(cluster: KubeCluster, run_dir: Path) -> None:
    """The Secret of the first time is replaced."""
    prepare(run_dir, "end", report={"url": "http://api:8080", "token": "first"})
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    cluster.api.faults = [Fault("POST", "rayjobs", how="cut")]
    with pytest.raises(ExecutorUnavailable, match="does not answer POST"):
        executor.launch(run_dir)
    prepare(run_dir, "end", report={"url": "http://api:8080", "token": "second"})
    executor.launch(run_dir)
    (secret,) = cluster.api.list("secrets")
    assert secret["data"]["token"] == "second"
    until(lambda: not executor.is_alive(run_dir))


def test_a_conflict_is_resolved_by_who_owns_the_object(cluster: KubeCluster, run_dir: Path) -> None:
    """Two services launch the same attempt at once: the second is answered 409."""

    class Late(kube_api.KubeApi):
        def get(self, resource: str, name: str) -> Any:
            found, self.looked = super().get(resource, name), getattr(self, "looked", 0) + 1
            return None if self.looked == 1 else found

    client = cluster.client()
    late = object.__new__(Late)
    late.__dict__ = client.__dict__
    first = cluster.executor(GRACE_SECONDS, COMMAND).launch(prepare(run_dir, "end"))
    until(lambda: state_of(cluster, first) == "Complete")
    assert cluster.executor(GRACE_SECONDS, COMMAND, client=late).launch(run_dir) == first
    assert cluster.api.requests.count(("POST", "rayjobs")) == 2


def test_what_the_schemas_refuse_is_no_reason_to_try_again(cluster: KubeCluster, run_dir: Path) -> None:
    template = cluster_template()
    template["headGroupSpec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(Problem, match="imagePolicy") as refusal:
        cluster.executor(GRACE_SECONDS, COMMAND, template=template).launch(run_dir)
    assert refusal.value.code == "ray-job-refused"
    assert "EVENKEEL_KUBERAY_TEMPLATE" in refusal.value.errors[0]["remedy"]


@pytest.mark.parametrize("how", ["answer", "cut", "expired"])
def test_a_watch_that_breaks_off_only_wakes(cluster: KubeCluster, run_dir: Path, how: str) -> None:
    """It expires (410), or its connection breaks off, while a run is ended."""
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    executor.launch(run_dir)
    until((run_dir / "begun").exists)
    if how == "expired":
        client, version = cluster.client(), cluster.api.listed("pods", "")["metadata"]["resourceVersion"]
        cluster.api.forget_events()
        query = [("watch", "true"), ("resourceVersion", version), ("timeoutSeconds", "1")]
        with pytest.raises(kube_api.Expired, match="too old resource version"):
            client._ask("GET", client._path("pods"), query=query, first_line=True)
    else:
        cluster.api.faults = [Fault("WATCH", "pods", 410, how=how, times=2)]
    assert executor.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    assert "stopped politely" in said(run_dir)


def test_a_log_that_cannot_be_had_now_is_had_later(cluster: KubeCluster, run_dir: Path) -> None:
    executor = cluster.executor(GRACE_SECONDS, COMMAND)
    executor.launch(run_dir)
    until((run_dir / "begun").exists)
    cluster.api.faults = [Fault("GET", "pods", 500, how="cut", message="no kubelet")]
    assert executor.is_alive(run_dir)
    assert executor.terminate(run_dir, grace_seconds=GRACE_SECONDS) is True
    assert [said(run_dir).count(word) for word in ("begins", "stopped politely", "the last line")] == [1, 1, 1]


# --- documents ---


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"run_id": "job_" + "x" * 50}, "at most 47"),
        ({"run_id": "1job"}, "is not a name"),
        ({"run_id": "job", "job": {"resources": {"gpus_per_worker": 1}}}, "no worker group 'gpu'"),
    ],
)
def test_runs_that_have_no_ray_job(run: dict[str, Any], says: str) -> None:
    template = cluster_template()
    template["workerGroupSpecs"].pop()
    with pytest.raises(ValueError, match=says):
        ray_job(run, Path("/runs/job"), ClusterTemplate(template), 60.0)


def test_a_directory_that_a_shell_would_read_is_refused() -> None:
    with pytest.raises(ValueError, match="characters that are special in a shell"):
        ray_job({"run_id": "job"}, Path("/runs/$(id)"), ClusterTemplate(cluster_template()), 60.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("headGroupSpec: 1", "not a RayClusterSpec"),
        ("[1]", "not a RayClusterSpec"),
        ("a: [", "expected"),
        ("headGroupSpec: {template: {spec: {containers: [{image: x}]}}}\nworkerGroupSpecs: []", "name them cpu, gpu"),
    ],
)
def test_templates_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s){says}.*Helm chart|{says}"):
        ClusterTemplate.read(path)
    with pytest.raises(ValueError, match="EVENKEEL_KUBERAY_TEMPLATE"):
        ClusterTemplate.read(tmp_path / "missing.yaml")


def test_documents_are_those_of_kuberays_crds() -> None:
    if not schemas.CRDS:
        pytest.skip("no CRDs of KubeRay: EVENKEEL_TEST_KUBERAY_CRDS names no folder with them")
    run = {"run_id": "job_1", "attempt": 1, "report": {"url": "http://api", "token": "x"}}
    job = ray_job(run, Path("/runs/job_1"), ClusterTemplate(cluster_template()), 60.0, queue="training")
    schemas.validate(job)
    schemas.validate(token_secret(run) or {})
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["serviceTyp"] = "ClusterIP"
    with pytest.raises(schemas.Invalid, match="serviceTyp"):
        schemas.validate(job)
    assert labels_of(run)["evenkeel.io/run"] == "job_1"
    assert object_name("job_1", 1) == job["metadata"]["name"]


def test_lines_of_one_moment_are_told_once() -> None:
    one, two = b"2026-01-01T00:00:00.5Z a\n", b"2026-01-01T00:00:00.500000000Z b\n"
    text, position = fresh_lines(one, Position())
    assert text == b"a\n"
    text, position = fresh_lines(one + two, position)
    assert text == b"b\n"
    later = b"2026-01-01T00:00:00.51Z c\n2026-01-01T00:00:01Z d\n"
    text, position = fresh_lines(one + two + later, position)
    assert text == b"c\nd\n"
    assert fresh_lines(later, position)[0] == b"", "and a log that was rotated begins later"


# --- settings ---


def kubeconfig(folder: Path, address: str) -> Path:
    path = folder / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path


def settings(folder: Path, **more: str) -> Settings:
    template = folder / "cluster.yaml"
    template.write_text(json.dumps(cluster_template()))
    return Settings.from_environment(
        {
            "EVENKEEL_HOME": str(folder / "home"),
            "EVENKEEL_EXECUTOR": "kuberay",
            "EVENKEEL_KUBERAY_TEMPLATE": str(template),
            "EVENKEEL_KUBERAY_NAMESPACE": NAMESPACE,
            **more,
        }
    )


def test_the_executor_of_the_settings(cluster: KubeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, cluster.address)))
    executor = executor_of(settings(tmp_path))
    assert isinstance(executor, KubeRayJobs)
    assert executor.is_alive(tmp_path / "job_0") is False
    assert executor.room() is None
    executor.close()
    (check,) = KubeRayJobs.diagnose(settings(tmp_path))
    assert (check.level, check.name) == ("ok", "executor")
    cluster.api.missing.add("rayjobs")
    (check,) = KubeRayJobs.diagnose(settings(tmp_path))
    assert check.level == "fail"
    assert "install the KubeRay operator" in check.message


def test_settings_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs EVENKEEL_KUBERAY_TEMPLATE"):
        executor_of(settings(tmp_path, EVENKEEL_KUBERAY_TEMPLATE=""))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"finds no cluster.*set KUBECONFIG"):
        executor_of(settings(tmp_path))
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ValueError, match=r"pip install 'evenkeel\[kubernetes\]'"):
        executor_of(settings(tmp_path))
    monkeypatch.setenv("EVENKEEL_EXECUTOR", "kuberay")
    monkeypatch.delenv("EVENKEEL_KUBERAY_TEMPLATE", raising=False)
    assert any("EVENKEEL_KUBERAY_TEMPLATE" in check.message for check in doctor.check_executor())
