"""Executors, keyed by name; other packages register an :class:`Executor` as entry point ``evenkeel.executors``."""

from __future__ import annotations

from importlib.metadata import entry_points

from embeddings.outside_packages import Registry
from service.core.settings import EXECUTOR_SETTINGS, Settings
from service.jobs.executors.base import Executor, Placement
from service.jobs.executors.kuberay import KubeRayJobs
from service.jobs.executors.local import LocalRuns
from service.jobs.executors.ray_jobs import RayJobs

EXECUTORS: Registry[type[Executor]] = Registry(
    "evenkeel.executors", {"local": LocalRuns, "ray_jobs": RayJobs, "kuberay": KubeRayJobs}
)


def executor_class(settings: Settings) -> type[Executor]:
    """Return the class of the executor that the settings name, after it has checked them.

    Raises:
        ValueError: No executor has this name, its package cannot be imported or registers something else, or a setting
            is wrong or not read by the executor.
    """
    name = settings.executor
    try:
        executor = EXECUTORS[name]
    except KeyError:
        names = [*EXECUTORS, *(entry.name for entry in entry_points(group=EXECUTORS.group))]
        raise ValueError(f"EVENKEEL_EXECUTOR is '{name}': set it to {' or '.join(names)}, or leave it out") from None
    if not (isinstance(executor, type) and issubclass(executor, Executor)):
        raise ValueError(
            f"EVENKEEL_EXECUTOR is '{name}': {executor!r} is not a subclass of {Executor.__module__}.Executor"
        )
    for setting, variable in EXECUTOR_SETTINGS.items():
        if getattr(settings, setting) and setting not in executor.settings_read:
            readers = " or ".join(other for other, kind in EXECUTORS.items() if setting in kind.settings_read)
            raise ValueError(f"{variable} is not read by {name}: needs EVENKEEL_EXECUTOR={readers}")
    for option, _ in settings.executor_options:
        if option not in executor.options:
            prefix = f"EVENKEEL_{name.upper()}_"
            variables = ", ".join(prefix + known for known in executor.options) or f"nothing that begins with {prefix}"
            raise ValueError(f"{prefix}{option} is not known: {name} reads {variables}")
    executor.check_settings(settings)
    return executor


def executor_of(settings: Settings) -> Executor:
    """Create the executor that the settings name; raise ValueError for wrong settings or a missing token."""
    return executor_class(settings).from_settings(settings)


def placement_of(settings: Settings) -> Placement:
    """Return the placement of the runs of the executor that the settings name."""
    return executor_class(settings).placement(settings)
