"""A cluster for tests, and executors that use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kubernetes.client import Configuration

from service.jobs.executors.kube_api import KubeApi
from service.jobs.executors.kuberay import KubeRayJobs
from service.jobs.executors.ray_job_manifest import ClusterTemplate
from tests.kube.api_server import NAMESPACE, TOKEN, ApiServer, api_server
from tests.kube.operator import Operator


def cluster_template() -> dict[str, Any]:
    """Return a RayClusterSpec as the chart makes it, less what only a chart knows."""

    def pod(name: str, **resources: str) -> dict[str, Any]:
        container = {"name": name, "image": "evenkeel:0.1.0", "resources": {"limits": resources}}
        return {"spec": {"containers": [container], "securityContext": {"runAsNonRoot": True}}}

    def group(name: str) -> dict[str, Any]:
        return {
            "groupName": name,
            "replicas": 0,
            "minReplicas": 0,
            "maxReplicas": 0,
            "rayStartParams": {},
            "template": pod("ray-worker", cpu="1", memory="4Gi"),
        }

    return {
        "rayVersion": "2.60.0",
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": pod("ray-head", cpu="1", memory="2Gi")},
        "workerGroupSpecs": [group("cpu"), group("gpu")],
    }


class KubeCluster:
    """An API server with KubeRay."""

    def __init__(self, api: ApiServer, address: str, operator: Operator):
        self.api, self.address, self.operator = api, address, operator

    def client(self, token: str = TOKEN, namespace: str = NAMESPACE, answer_seconds: float = 20.0) -> KubeApi:
        configuration = Configuration(host=self.address)
        configuration.api_key = {"authorization": f"Bearer {token}"}
        return KubeApi(configuration, namespace, answer_seconds)

    def executor(self, stop_seconds: float, entrypoint: Sequence[str], **more: Any) -> KubeRayJobs:
        client = more.pop("client", None) or self.client()
        template = ClusterTemplate(more.pop("template", None) or cluster_template())
        return KubeRayJobs(client, template, stop_seconds, entrypoint=entrypoint, **more)


@contextmanager
def kube_cluster() -> Iterator[KubeCluster]:
    with api_server() as (api, address):
        operator = Operator(api)
        try:
            yield KubeCluster(api, address, operator)
        finally:
            operator.close()
