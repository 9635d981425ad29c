"""``evenkeel doctor`` for runs that are jobs of a Ray cluster: settings, token, access control, free resources."""

from __future__ import annotations

from collections.abc import Iterator

from service.core.errors import Problem
from service.core.settings import Settings
from service.jobs.executors.base import ExecutorUnavailable
from service.jobs.executors.ray_api import TOKEN_REMEDY, RayApi, ray_token
from service.ops.check import Check


def check_ray_jobs() -> Iterator[Check]:
    """Check the cluster if EVENKEEL_EXECUTOR=ray_jobs; submits nothing."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        yield Check("executor", "fail", str(error), "correct the variable that is named")
        return
    token = ray_token()
    if token is None:
        yield Check("executor", "fail", "ray_jobs submits with a token only, and finds none", TOKEN_REMEDY)
        return
    assert settings.ray_address is not None
    api = RayApi(settings.ray_address, token)
    try:
        api.refuse_open_cluster()
        free_nodes = api.room()
    except Problem as problem:
        yield Check("executor", "fail", problem.detail, TOKEN_REMEDY)
        return
    except ExecutorUnavailable as error:
        yield Check("executor", "fail", str(error), "start the cluster, or correct EVENKEEL_RAY_ADDRESS and the token")
        return
    if free_nodes is None:
        free = "does not tell what is free: jobs are submitted whenever EVENKEEL_MAX_RUNS lets them"
        yield Check(
            "executor", "warn", f"{settings.ray_address} answers, token on, but {free}", "wait for its autoscaler"
        )
    else:
        cpus, gpus = sum(node.cpus for node in free_nodes), sum(node.gpus for node in free_nodes)
        nodes = "1 node" if len(free_nodes) == 1 else f"{len(free_nodes)} nodes"
        free = f"{cpus:g} CPUs and {gpus:g} GPUs free on {nodes}"
        yield Check("executor", "ok", f"{settings.ray_address} answers, token on, nobody is let in without; {free}")
    if settings.internal_url is None:
        where = f"runs share EVENKEEL_HOME {settings.home} with this service: mount it at the same path on every node"
    else:
        where = f"runs report to {settings.internal_url} and keep {settings.cluster_runs}, which every node has to see"
    yield Check("runs", "ok", where)
