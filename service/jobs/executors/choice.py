"""Executors by name; other packages enter theirs as ``evenkeel.executors``, functions of the settings."""

from __future__ import annotations

from collections.abc import Callable

from embeddings.outside_packages import Registry
from service.core.settings import Settings
from service.jobs.executors.base import Executor
from service.jobs.executors.local import LocalRuns
from service.jobs.executors.ray_api import TOKEN_REMEDY, RayApi, ray_token
from service.jobs.executors.ray_jobs import RayJobs


def executor_of(settings: Settings) -> Executor:
    """Return the executor that the settings name.

    Raises:
        ValueError: It is ``ray_jobs`` and there is no token to submit with, or its package cannot be imported.
    """
    return EXECUTORS[settings.executor](settings)


def _local(settings: Settings) -> Executor:
    return LocalRuns()


def _ray_jobs(settings: Settings) -> Executor:
    token = ray_token()
    if token is None:
        raise ValueError(f"EVENKEEL_EXECUTOR=ray_jobs submits with a token only, and finds none: {TOKEN_REMEDY}")
    assert settings.ray_address is not None
    return RayJobs(
        RayApi(settings.ray_address, token),
        settings.cancel_grace_seconds,
        cluster_runs=settings.cluster_runs,
        resources=dict(settings.driver_resources),
    )


EXECUTORS: Registry[Callable[[Settings], Executor]] = Registry(
    "evenkeel.executors", {"local": _local, "ray_jobs": _ray_jobs}
)
