"""The interface of executors to the service and its runner; ``tests/contracts/test_executor.py`` has examples."""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from service.core.settings import Settings
from trainer.runs.directory import THIS_CLUSTER
from trainer.runs.protocol import (
    ATTEMPT_VARIABLE,
    LOG_FILE,
    RUN_DIR_VARIABLE,
    RUN_ID_VARIABLE,
    STOP_SECONDS_VARIABLE,
)
from trainer.sizing.gpus import gpu_problem, known_gpu_bytes
from trainer.sizing.memory import machine_memory_bytes
from trainer.spec import JobSpec

ENTRYPOINT = ("python", "-m", "trainer.launch.entrypoint")
LOG_SECONDS = 3.0
"""Shortest time between two fetches of a log."""
LOG_SHARE = 20.0
"""Fetch logs for at most 1/LOG_SHARE of the time, however long they have grown."""
Level = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """A finding of ``evenkeel doctor``: ``level`` ok, warn (works, with a limit) or fail (will not work)."""

    name: str
    level: Level
    message: str
    remedy: str = ""


class ExecutorUnavailable(Exception):
    """The executor cannot be reached now (its cluster does not answer), so the state of the run is unknown.

    The run may be alive or gone: keep it, and ask again later.
    """


class FreeResources(NamedTuple):
    """Free resources of one machine."""

    cpus: float
    memory_bytes: int
    gpus: float


@dataclass(frozen=True)
class Placement:
    """The machines of an executor's runs, as far as the service can see them.

    Attributes:
        uses_this_host: True if runs take this host's cores, memory and GPUs, which the queue then allocates.
        ray_address: The Ray cluster that the ranks join: HOST:PORT, or ``THIS_CLUSTER`` for the one that starts the
            run; None if ranks are processes of the run's host.
    """

    uses_this_host: bool
    ray_address: str | None = None

    @property
    def gpus_are_visible(self) -> bool:
        """True if the service can count the GPUs: those of this host, or of a Ray cluster with an address."""
        return self.uses_this_host or self.ray_address not in (None, THIS_CLUSTER)

    def memory_bytes(self) -> int | None:
        """Return the memory of the machine that runs use, None if it is not this one."""
        return machine_memory_bytes() if self.uses_this_host else None

    def gpu_bytes(self, job: JobSpec) -> int | None:
        """Return the memory of the GPU of each rank, None if it cannot be seen from here or the job has no GPUs."""
        return known_gpu_bytes(job, None) if self.uses_this_host else None

    def gpu_problem(self, job: JobSpec) -> tuple[str, str] | None:
        """Return the job's missing GPUs and the remedy; None if none are missing, or only the run can tell."""
        return gpu_problem(job, self.ray_address) if self.gpus_are_visible else None


THIS_HOST = Placement(uses_this_host=True)


class Executor(ABC):
    """Executes runs, each identified by its run directory, which contains ``run.json``.

    The class tells the service what holds before there is an executor: settings, where runs are, and checks. Each call
    to an executor may block, and may raise :class:`ExecutorUnavailable`.

    Attributes:
        settings_read: Those of ``EXECUTOR_SETTINGS`` (service.core.settings) that it reads; the others are refused.
        options: Names of its own settings: NAME is variable ``EVENKEEL_EXECUTOR_NAME``, as in
            ``EVENKEEL_KUBERAY_NAMESPACE``, and is found in ``settings.executor_options``. Others are refused.
    """

    settings_read: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Collection[str]] = ()

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Settings) -> Executor:
        """Make the executor that checked settings ask for.

        Raises:
            ValueError: Something that is no setting is missing, such as a token.
        """

    @classmethod
    @abstractmethod
    def placement(cls, settings: Settings) -> Placement:
        """Return the placement of its runs."""

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        """Check the values of the settings that it reads.

        Raises:
            ValueError: One is wrong; the message names its variable and the remedy.
        """
        return

    @classmethod
    @abstractmethod
    def diagnose(cls, settings: Settings) -> Iterator[Check]:
        """Yield the findings of ``evenkeel doctor``: is the cluster there, does it let us in; starts nothing."""

    @abstractmethod
    def launch(self, run_dir: Path, /) -> object:
        """Start the attempt that ``run.json`` names.

        Raises:
            RuntimeError: A run of this directory is alive.
            OSError: The attempt cannot be started.
            ValueError: The attempt cannot be started.
            Problem: The attempt cannot be started, and trying again would not help.
        """

    @abstractmethod
    def is_alive(self, run_dir: Path, /) -> bool:
        """Return True if the attempt launched last is running or waiting to run, and update its log.

        The answer is False for an attempt that was never launched.
        """

    @abstractmethod
    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        """End the attempt and everything it left behind; return True if it ended by itself.

        The attempt is first asked to end, then forced after ``grace_seconds``. A repeated call, or one for an attempt
        that is gone or never existed, removes what is left and returns True.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the executor holds beside the runs, which continue; the owner calls this last."""

    def room(self) -> list[FreeResources] | None:
        """Return the free resources of each machine, if runs are not on this host; None if unknown."""
        return None


def check_cluster_runs(settings: Settings) -> None:
    """Check where runs of a cluster keep their files: all in the service's home, or elsewhere, and then they report.

    Raises:
        ValueError: One of the two settings is missing.
    """
    if (settings.internal_url is None) != (settings.run_storage is None):
        raise ValueError(
            f"EVENKEEL_INTERNAL_URL and EVENKEEL_RUN_STORAGE go together with EVENKEEL_EXECUTOR={settings.executor}: "
            "set both where the cluster does not share EVENKEEL_HOME, else neither"
        )


class ClusterExecutor(Executor):
    """An executor whose runs are on a cluster: where their directories are, and logs that are fetched now and then.

    Args:
        stop_seconds: Time from SIGTERM to SIGKILL; it is part of the submission, so the same for every ending.
        shared_runs: Location of the run directories on the cluster, if it differs from here.
        entrypoint: What is started.
    """

    def __init__(self, stop_seconds: float, shared_runs: Path | None, entrypoint: Sequence[str]):
        self._stop_seconds = stop_seconds
        self._shared_runs = shared_runs
        self._entrypoint = tuple(entrypoint)
        self._log_due: dict[Path, float] = {}

    @classmethod
    def placement(cls, settings: Settings) -> Placement:
        return Placement(uses_this_host=False, ray_address=THIS_CLUSTER)

    def _on_cluster(self, run: Mapping[str, Any], run_dir: Path) -> Path:
        return self._shared_runs / run["run_id"] if self._shared_runs is not None else run_dir.resolve()

    def _log_is_due(self, run_dir: Path, last: bool) -> bool:
        return last or time.monotonic() >= self._log_due.get(run_dir, 0.0)

    def _append_log(self, run_dir: Path, text: bytes, started: float, last: bool) -> None:
        """Append what was fetched since ``started``, and plan the next fetch."""
        if text:
            with open(run_dir / LOG_FILE, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(text)
        now = time.monotonic()
        self._log_due[run_dir] = now + max(LOG_SECONDS, LOG_SHARE * (now - started))
        if last:
            del self._log_due[run_dir]


def variables_of(run: Mapping[str, Any], directory: Path, stop_seconds: float) -> dict[str, str]:
    """Return the environment by which an attempt knows itself; ``directory`` is where the cluster has it."""
    return {
        RUN_ID_VARIABLE: str(run["run_id"]),
        RUN_DIR_VARIABLE: str(directory),
        ATTEMPT_VARIABLE: str(run.get("attempt", 1)),
        STOP_SECONDS_VARIABLE: str(math.ceil(stop_seconds)),
    }


def read_record(file: Path) -> dict[str, Any]:
    """Return the record that an executor keeps of a run; empty without a readable one."""
    try:
        document = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
