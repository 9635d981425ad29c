"""The choice of the executor by the settings."""

from __future__ import annotations

from service.core.settings import Settings
from service.jobs.executors.base import Executor
from service.jobs.executors.local import LocalRuns
from service.jobs.executors.ray_api import TOKEN_REMEDY, RayApi, ray_token
from service.jobs.executors.ray_jobs import RayJobs


def executor_of(settings: Settings) -> Executor:
    """Return the executor that the settings name.

    Raises:
        ValueError: It is ``ray_jobs`` and there is no token to submit with.
    """
    if settings.executor == "local":
        return LocalRuns()
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
