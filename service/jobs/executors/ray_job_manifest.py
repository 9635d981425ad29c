"""The RayJob manifest of an attempt: the cluster template with the job's resources, owner labels and environment."""

from __future__ import annotations

import copy
import hashlib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from service.jobs.executors.base import ENTRYPOINT, variables_of
from trainer.runs.protocol import REPORT_TOKEN_VARIABLE, REPORT_URL_VARIABLE
from trainer.spec.job import Resources
from trainer.spec.stored_specs import StoredJob

RUN_LABEL, ATTEMPT_LABEL, FENCE_LABEL, ROLE_LABEL = (
    f"evenkeel.io/{word}" for word in ("run", "attempt", "fence", "role")
)
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED = {"app.kubernetes.io/managed-by": "evenkeel"}
MAX_NAME = 47
"""Longest name of a RayJob; KubeRay derives the names of the cluster and its services from it."""
PRE_STOP = ("python", "-m", "trainer.runs.preemption")
"""Command that Kubernetes runs in a pod before it ends the pod; it makes the ranks write a checkpoint."""
OVERHEAD_BYTES = 2**30
"""Memory of a worker's pod in addition to its rank's, for Ray's own processes and object store."""
KEEP_CLUSTER_SECONDS = 60
"""Time for which a cluster outlives its run if the service is down and cannot delete it."""
TOKEN_KEY = "token"
Document = dict[str, Any]


class ClusterTemplate:
    """A RayClusterSpec of which each run gets a copy. It must have a head, and a worker group ``cpu``, ``gpu`` or both.

    ``source``: origin of the document, such as a path, for messages.

    Raises:
        ValueError: The document has no head, or no worker group of a known name.
    """

    def __init__(self, document: Any, source: str = "the cluster template"):
        self._source = source
        try:
            self._document: Document = dict(document)
            self._groups = {str(group["groupName"]): group for group in self._document["workerGroupSpecs"]}
            for group in (self._document["headGroupSpec"], *self._groups.values()):
                group["template"]["spec"]["containers"][0]["image"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"{source}: not a RayClusterSpec with headGroupSpec and workerGroupSpecs, each with a container and "
                f"its image ({type(error).__name__}: {error}); use the template of the Helm chart"
            ) from None
        if not self._groups or set(self._groups) - {"cpu", "gpu"}:
            raise ValueError(f"{source}: its workerGroupSpecs are {sorted(self._groups)}: name them cpu, gpu or both")

    @classmethod
    def read(cls, path: Path) -> ClusterTemplate:
        """Read a YAML file.

        Raises:
            ValueError: The file cannot be read, or is not such a template.
        """
        try:
            return cls(yaml.safe_load(path.read_text("utf-8")), str(path))
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            raise ValueError(f"EVENKEEL_KUBERAY_TEMPLATE: {error}; use the template of the Helm chart") from None

    def cluster(self, resources: Resources, workers: int | None = None) -> Document:
        """Return the spec of a cluster for a job's resources; ``workers``, if given, replaces their number of workers.

        Raises:
            ValueError: The template has no worker group for these resources.
        """
        gpus = math.ceil(resources.gpus_per_worker)
        name = "gpu" if gpus else "cpu"
        if name not in self._groups:
            remedy = "add one, or request no GPUs" if gpus else "add one"
            raise ValueError(f"{self._source} has no worker group '{name}', which the job needs: {remedy}")
        spec, group = copy.deepcopy((self._document, self._groups[name]))
        workers = workers or resources.num_workers
        group |= {
            "replicas": workers, "minReplicas": min(resources.least_workers, workers), "maxReplicas": workers,
        }  # fmt: skip
        amounts = {"cpu": f"{resources.cpus_per_worker:g}"}
        if resources.memory_bytes_per_worker:
            amounts["memory"] = str(resources.memory_bytes_per_worker + OVERHEAD_BYTES)
        if gpus:
            amounts["nvidia.com/gpu"] = str(gpus)
        container = group["template"]["spec"]["containers"][0]
        stated = container.get("resources", {})
        container["resources"] = {kind: stated.get(kind, {}) | amounts for kind in ("limits", "requests")}
        return spec | {"workerGroupSpecs": [group], "authOptions": {"mode": "token"}}


def object_name(run_id: str, attempt: int) -> str:
    """Return the name of an attempt's Kubernetes objects.

    Raises:
        ValueError: The name would be too long or have characters that Kubernetes forbids.
    """
    name = f"{run_id}-{attempt}".lower().replace("_", "-")
    if len(name) > MAX_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(f"run '{run_id}': '{name}' is not a name of at most {MAX_NAME} letters, digits and '-'")
    return name


def fence(run: Mapping[str, Any]) -> str:
    """Return a hash that identifies the attempt's lease without revealing it."""
    lease = (run.get("lease") or {}).get("token", "")
    return hashlib.sha256(f"{run['run_id']} {run.get('attempt', 1)} {lease}".encode()).hexdigest()[:32]


def labels_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that name the run, attempt and lease to which an object belongs."""
    return MANAGED | {RUN_LABEL: str(run["run_id"]), ATTEMPT_LABEL: str(run.get("attempt", 1)), FENCE_LABEL: fence(run)}


def token_secret(run: Mapping[str, Any]) -> Document | None:
    """Return the Secret with the token by which the run reports to the service; None without such reports."""
    if not run.get("report"):
        return None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": object_name(run["run_id"], run.get("attempt", 1)), "labels": labels_of(run)},
        "type": "Opaque",
        "stringData": {TOKEN_KEY: run["report"]["token"]},
    }


def ray_job(
    run: Mapping[str, Any],
    directory: Path,
    template: ClusterTemplate,
    stop_seconds: float,
    *,
    queue: str | None = None,
    entrypoint: Sequence[str] = ENTRYPOINT,
) -> Document:
    """Return the RayJob of an attempt.

    ``directory``: the path of the run directory on the cluster. ``queue``: a LocalQueue of Kueue, which then decides
    when the run starts.

    Raises:
        ValueError: The template has no worker group for the job, or the run's name or directory cannot be used.
    """
    labels = labels_of(run)
    if shlex.quote(str(directory)) != str(directory):
        raise ValueError(f"{directory}: the run directory has characters that are special in a shell; rename it")
    name = object_name(run["run_id"], run.get("attempt", 1))
    workers = (run.get("workers") or {}).get("number")
    cluster = template.cluster(StoredJob(run.get("job") or {}).resources, workers)
    variables = variables_of(run, directory, stop_seconds)
    environment: list[Document] = [{"name": variable, "value": value} for variable, value in variables.items()]
    if report := run.get("report"):
        environment += [
            {"name": REPORT_URL_VARIABLE, "value": report["url"]},
            {"name": REPORT_TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": TOKEN_KEY}}},
        ]
    head = cluster["headGroupSpec"]["template"]
    submitter = _submitter(head)
    _own(submitter, labels, "submitter", [])
    _own(head, labels, "head", environment)
    for group in cluster["workerGroupSpecs"]:
        _own(group["template"], labels, "worker", environment)
    for template_of_pod in (head, *(group["template"] for group in cluster["workerGroupSpecs"])):
        _warn_before_the_end(template_of_pod, math.ceil(stop_seconds))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": labels | ({QUEUE_LABEL: queue} if queue else {})},
        "spec": {
            # With exec the run itself gets the job's signals and sets its exit code.
            "entrypoint": shlex.join(("exec", *entrypoint, "--run-dir", str(directory))),
            "jobId": name,
            "submissionMode": "K8sJobMode",  # the only mode whose log outlives the cluster
            "submitterConfig": {"backoffLimit": 0},
            "submitterPodTemplate": submitter,
            "backoffLimit": 0,
            "suspend": queue is not None,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEEP_CLUSTER_SECONDS,
            "rayClusterSpec": cluster,
        },
    }


def _own(template: Document, labels: Mapping[str, str], role: str, environment: list[Document]) -> None:
    metadata = template.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels, ROLE_LABEL: role}
    if environment:
        names = {variable["name"] for variable in environment}
        container = template["spec"]["containers"][0]
        container["env"] = [
            variable for variable in container.get("env") or [] if variable["name"] not in names
        ] + environment


def _warn_before_the_end(template: Document, seconds: int) -> None:
    """Make a pod that is evicted, or whose node is drained, stop its run first; values set in the template are kept."""
    spec = template["spec"]
    spec["containers"][0].setdefault("lifecycle", {}).setdefault("preStop", {"exec": {"command": list(PRE_STOP)}})
    # Kubernetes' default is 30 seconds.
    spec.setdefault("terminationGracePeriodSeconds", max(30, seconds + 10))


def _submitter(head: Mapping[str, Any]) -> Document:
    """Return the template of the pod that submits the run and has its log: the head's without volumes and resources."""
    spec, container = head["spec"], head["spec"]["containers"][0]
    pod = ("imagePullSecrets", "nodeSelector", "tolerations", "serviceAccountName", "securityContext")
    same = ("image", "imagePullPolicy", "securityContext")
    return {
        "spec": {key: copy.deepcopy(spec[key]) for key in pod if key in spec}
        | {
            "restartPolicy": "Never",
            "containers": [
                {key: copy.deepcopy(container[key]) for key in same if key in container}
                | {
                    "name": "ray-job-submitter",
                    "resources": {
                        "requests": {"cpu": "100m", "memory": "256Mi"},
                        "limits": {"cpu": "1", "memory": "1Gi"},
                    },
                }
            ],
        }
    }
