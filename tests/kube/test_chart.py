"""The Helm chart: rendered by Helm, each object held against the schemas, and against what the executor does with it.

Helm is ``helm`` on the PATH, or EVENKEEL_TEST_HELM.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.jobs.executors.ray_job_manifest import ClusterTemplate, ray_job
from tests.kube import schemas

pytestmark = pytest.mark.process

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "evenkeel"
ALL = {
    "ingress": {"enabled": True, "host": "vectors.example.com", "tlsSecret": "tls"},
    "api": {"autoscaling": {"enabled": True}},
    "redis": {"enabled": True},
    "runs": {"gpu": {"enabled": True}, "queue": "training"},
    "data": [{"name": "clicks", "claim": "clicks-pvc"}],
    "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]},
    "image": {"pullSecrets": [{"name": "registry"}]},
}
RAY_JOBS = {"runs": {"executor": "ray_jobs", "gpu": {"enabled": True}}, "rayCluster": {"autoscaling": True}}
EXTERNAL = {
    "postgresql": {"enabled": False, "host": "db.example.com"},
    "home": {"existingClaim": "home"},
    "storeUrl": "s3://bucket/store",
    "storeSecret": "s3",
    "networkPolicy": {"enabled": False},
}


def helm(folder: Path, values: dict[str, Any], command: str = "template") -> subprocess.CompletedProcess[str]:
    program = os.environ.get("EVENKEEL_TEST_HELM") or shutil.which("helm")
    if program is None:
        pytest.skip("no helm to render the chart with")
    given = folder / "values.yaml"
    given.write_text(yaml.safe_dump(values))
    name = ["rel"] if command == "template" else []
    call = [program, command, *name, str(CHART), "--namespace", "team", "--values", str(given)]
    return subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rendered: dict[str, list[dict[str, Any]]] = {}

    def rendering(values: dict[str, Any]) -> list[dict[str, Any]]:
        if str(values) not in rendered:
            done = helm(tmp_path_factory.mktemp("chart"), values)
            assert done.returncode == 0, done.stderr
            rendered[str(values)] = [one for one in yaml.safe_load_all(done.stdout) if one]
        return rendered[str(values)]

    return rendering


def named(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


@pytest.mark.parametrize("values", [{}, ALL, RAY_JOBS, EXTERNAL], ids=["default", "all", "ray_jobs", "external"])
def test_each_object_is_one_that_kubernetes_takes(render: Any, values: dict[str, Any]) -> None:
    objects = render(values)
    for one in objects:
        schemas.validate(one)
    assert len({(one["kind"], one["metadata"]["name"]) for one in objects}) == len(objects), "each once"
    assert not named(objects, "Secret"), "secrets are named, not made"
    assert set(named(objects, "Deployment")) == {"rel-api", "rel-scheduler", "rel-vectors"}
    assert set(named(objects, "PodDisruptionBudget")) == {"rel-api", "rel-vectors"}


def test_a_wrong_object_is_seen(render: Any) -> None:
    """The schemas refuse what a slip in a template makes."""
    deployment = named(render({}), "Deployment")["rel-api"]
    broken = yaml.safe_load(yaml.safe_dump(deployment))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(schemas.Invalid, match="livenessProb"):
        schemas.validate(broken)


def test_pods_are_restricted_and_have_resources_and_probes(render: Any) -> None:
    objects = render(ALL)
    templates = [
        one["spec"]["template"] for kind in ("Deployment", "StatefulSet") for one in named(objects, kind).values()
    ]
    ours = len(templates)
    templates += schemas.pod_templates(cluster_document(objects))
    for number, template in enumerate(templates):
        pod = template["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {"limits", "requests"} <= set(container["resources"])
        if number < ours:
            assert {"readinessProbe", "livenessProbe"} <= set(container)


def cluster_document(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return yaml.safe_load(named(objects, "ConfigMap")["rel-cluster-template"]["data"]["cluster.yaml"])


def test_selectors_and_references_meet(render: Any) -> None:
    """Each Service, budget, autoscaler and policy selects pods that there are; each claim and account exists."""
    objects = render(ALL)
    pods = [one["spec"]["template"] for kind in ("Deployment", "StatefulSet") for one in named(objects, kind).values()]
    pods += schemas.pod_templates(cluster_document(objects))
    labels = [pod["metadata"]["labels"] for pod in pods]

    def selects(selector: dict[str, str]) -> bool:
        return any(selector.items() <= one.items() for one in labels)

    for service in named(objects, "Service").values():
        assert selects(service["spec"]["selector"])
    for budget in named(objects, "PodDisruptionBudget").values():
        assert selects(budget["spec"]["selector"]["matchLabels"])
    for policy in named(objects, "NetworkPolicy").values():
        assert selects(policy["spec"]["podSelector"]["matchLabels"])
    assert {one["spec"]["scaleTargetRef"]["name"] for one in named(objects, "HorizontalPodAutoscaler").values()} <= set(
        named(objects, "Deployment")
    )
    accounts, claims = named(objects, "ServiceAccount"), named(objects, "PersistentVolumeClaim")
    for pod in pods:
        assert pod["spec"].get("serviceAccountName") in {None, *accounts}
        for volume in pod["spec"].get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim in {None, "clicks-pvc", *claims}
    (backend,) = named(objects, "Ingress")["rel-ingress"]["spec"]["rules"][0]["http"]["paths"]
    assert backend["backend"]["service"]["name"] in named(objects, "Service")


def test_runs_see_neither_the_database_nor_the_keys(render: Any) -> None:
    for pod in schemas.pod_templates(cluster_document(render(ALL))):
        assert pod["spec"]["automountServiceAccountToken"] is False
        (container,) = pod["spec"]["containers"]
        assert not {"PGPASSWORD", "EVENKEEL_DATABASE_URL"} & {one["name"] for one in container["env"]}
        mounts = {
            mount["mountPath"]: mount.get("subPath") for mount in container["volumeMounts"] if mount["name"] == "home"
        }
        assert mounts == {"/var/lib/evenkeel/runs": "runs", "/var/lib/evenkeel/store": "store"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_template_makes_a_ray_job(render: Any, gpus: int) -> None:
    template = ClusterTemplate(cluster_document(render(ALL)))
    resources = {"num_workers": 3, "cpus_per_worker": 2, "gpus_per_worker": gpus, "memory_bytes_per_worker": 2**33}
    run = {"run_id": "job_01", "attempt": 2, "job": {"resources": resources}}
    job = ray_job(run, Path("/var/lib/evenkeel/runs/job_01"), template, 60.0, queue="training")
    schemas.validate(job)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == 3
    pod = group["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "2", "memory": str(2**33 + 2**30)} | ({"nvidia.com/gpu": "1"} if gpus else {})
    assert pod.get("nodeSelector") == ({"nvidia.com/gpu.present": "true"} if gpus else None)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"postgresql": {"enabled": False}}, "postgresql.host"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"runs": {"executor": "local"}}, "executor"),
        ({"postgresql": {"existingSecret": ""}}, "existingSecret"),
        ({"storeUrl": "redis://:secret@host:6379/0"}, "storeUrl"),
        ({"shceduler": {}}, "shceduler"),
    ],
)
def test_values_that_do_not_go_together_are_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    done = helm(tmp_path, values)
    assert done.returncode != 0
    assert says in done.stderr


def test_helm_lint_finds_nothing(tmp_path: Path) -> None:
    done = helm(tmp_path, ALL, "lint")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
