"""The interface by which service and runner use executors; ``tests/contracts/test_executor.py`` has examples."""

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
from trainer.runs.protocol import ATTEMPT_VARIABLE, LOG_FILE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE, STOP_SECONDS_VARIABLE
from trainer.sizing.gpus import gpu_problem, known_gpu_bytes
from trainer.sizing.memory import machine_memory_bytes
from trainer.spec import JobSpec

ENTRYPOINT = ("python", "-m", "trainer.launch.entrypoint")
LOG_SECONDS = 3.0
"""Shortest time between two fetches of a log."""
LOG_SHARE = 20.0
"""Fetching a log takes at most 1/LOG_SHARE of the time, however long the log has grown."""
Level = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """A finding of ``evenkeel doctor``: ``level`` ok, warn (works, with a limit) or fail (will not work)."""

    name: str
    level: Level
    message: str
    remedy: str = ""


class ExecutorUnavailable(Exception):
    """Error for an executor whose cluster does not answer now, so that the state of the run is unknown.

    The run may be alive or gone: callers must keep it and ask again later.
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
        ray_address: The Ray cluster that the ranks join: HOST:PORT, or ``THIS_CLUSTER`` for the cluster that starts the
            run. None if the ranks are processes on the run's host.
    """

    uses_this_host: bool
    ray_address: str | None = None

    @property
    def gpus_are_visible(self) -> bool:
        """True if the service can count the GPUs: on this host, or in a Ray cluster whose address it knows."""
        return self.uses_this_host or self.ray_address not in (None, THIS_CLUSTER)

    def memory_bytes(self) -> int | None:
        """Return the memory of the machine on which runs are started, or None if that is not this machine."""
        return machine_memory_bytes() if self.uses_this_host else None

    def gpu_bytes(self, job: JobSpec) -> int | None:
        """Return the memory of each rank's GPU; None if the GPUs are not this host's or the job uses none."""
        return known_gpu_bytes(job, None) if self.uses_this_host else None

    def gpu_problem(self, job: JobSpec) -> tuple[str, str] | None:
        """Return (message about missing GPUs, remedy); None if none are missing or only the run can find out."""
        return gpu_problem(job, self.ray_address) if self.gpus_are_visible else None


THIS_HOST = Placement(uses_this_host=True)


class Executor(ABC):
    """Executes runs, each identified by its run directory, which contains ``run.json``.

    The class methods answer questions before an executor exists: its settings, the placement of its runs, its checks.
    Each call to an executor may block, and may raise :class:`ExecutorUnavailable`.

    Attributes:
        settings_read: Names in ``EXECUTOR_SETTINGS`` (service.core.settings) that the executor reads; if any other of
            these is set, it is refused.
        options: Names of the executor's own settings, from variables ``EVENKEEL_<EXECUTOR>_<NAME>`` such as
            ``EVENKEEL_KUBERAY_NAMESPACE``. The values of these variables are in ``settings.executor_options``. Other
            names are refused.
    """

    settings_read: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Collection[str]] = ()

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Settings) -> Executor:
        """Create the executor from settings that were checked.

        Raises:
            ValueError: Something besides the settings is missing, such as a token.
        """

    @classmethod
    @abstractmethod
    def placement(cls, settings: Settings) -> Placement:
        """Return the placement of runs by this kind of executor."""

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        """Check the values of the settings that the executor reads.

        Raises:
            ValueError: A setting is wrong; the message names its variable and the remedy.
        """
        return

    @classmethod
    @abstractmethod
    def diagnose(cls, settings: Settings) -> Iterator[Check]:
        """Yield findings for ``evenkeel doctor``, such as that the cluster refuses our token; starts nothing."""

    def warm_up(self) -> None:
        """Prepare for the first launch. The service calls it when it starts, and takes jobs meanwhile."""
        return

    @abstractmethod
    def launch(self, run_dir: Path, /) -> object:
        """Start the attempt that ``run.json`` names.

        Raises:
            RuntimeError: A run with this directory is still alive.
            OSError: The attempt cannot be started.
            ValueError: The attempt cannot be started with this ``run.json``.
            Problem: The attempt cannot be started, and trying again would not help.
        """

    @abstractmethod
    def is_alive(self, run_dir: Path, /) -> bool:
        """Return True if the attempt launched last is running or waiting to run; also update its log.

        The answer is False for an attempt that was never launched.
        """

    @abstractmethod
    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        """End the attempt and remove what it left behind; return True if it ended without being forced.

        The attempt is first asked to end, then forced after ``grace_seconds``. A repeated call, or a call for an
        attempt that is gone or never existed, removes what is left and returns True.
        """

    def exit_code(self, run_dir: Path, /) -> int | None:
        """Return the exit code of the attempt launched last, as of the last :meth:`is_alive`; None if unknown."""
        return None

    def ping(self) -> None:
        """Raise :class:`ExecutorUnavailable` if the executor's cluster does not answer."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the executor's own resources; runs continue. No other call may follow."""

    def room(self) -> list[FreeResources] | None:
        """Return the free resources of each machine, if runs are not on this host; None if unknown."""
        return None


def check_cluster_runs(settings: Settings) -> None:
    """Check that internal URL and run storage, which runs on a cluster need together, are both set or both unset.

    Raises:
        ValueError: Only one of the two is set.
    """
    if (settings.internal_url is None) != (settings.run_storage is None):
        raise ValueError(
            f"EVENKEEL_INTERNAL_URL and EVENKEEL_RUN_STORAGE go together with EVENKEEL_EXECUTOR={settings.executor}: "
            "set both if the cluster does not share EVENKEEL_HOME, otherwise neither"
        )


class ClusterExecutor(Executor):
    """Base of executors whose runs are on a cluster: locates their directories, and fetches their logs at intervals.

    Args:
        stop_seconds: Time from SIGTERM to SIGKILL; it is part of the submission, so it cannot be changed when a run is
            ended.
        shared_runs: Directory of all run directories on the cluster; None if it is the same as on this machine.
        entrypoint: Command that starts a run.
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
        """Append ``text``, whose fetch began at ``started``, to the run's log, and plan the next fetch."""
        if text:
            with open(run_dir / LOG_FILE, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(text)
        now = time.monotonic()
        self._log_due[run_dir] = now + max(LOG_SECONDS, LOG_SHARE * (now - started))
        if last:
            del self._log_due[run_dir]


def variables_of(run: Mapping[str, Any], directory: Path, stop_seconds: float) -> dict[str, str]:
    """Return the environment variables in which an attempt's process finds its run; ``directory`` is on the cluster."""
    return {
        RUN_ID_VARIABLE: str(run["run_id"]),
        RUN_DIR_VARIABLE: str(directory),
        ATTEMPT_VARIABLE: str(run.get("attempt", 1)),
        STOP_SECONDS_VARIABLE: str(math.ceil(stop_seconds)),
    }


def read_record(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run's directory; empty if it is missing or unreadable."""
    try:
        document = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
