"""What an executor is, to the service and its runner; ``tests/contracts/test_executor.py`` shows it by example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from service.core.check import Check
    from service.core.settings import Settings
    from service.jobs.executors.placement import Placement


class ExecutorUnavailable(Exception):
    """The executor cannot be reached now (its cluster does not answer), so the state of the run is unknown.

    It may be alive or gone: do not give it up, and ask again later.
    """


class FreeResources(NamedTuple):
    """Free resources of one machine."""

    cpus: float
    memory_bytes: int
    gpus: float


class Executor(ABC):
    """Executes runs, each identified by its run directory, which contains ``run.json``.

    The class tells the service what holds before there is an executor: settings, where runs are, and checks. Each call
    to an executor may block, and may raise :class:`ExecutorUnavailable`.

    Attributes:
        settings_read: Those of ``EXECUTOR_SETTINGS`` (service.core.settings) that it reads; the others are refused.
        options: Its own settings by name, each in one line: NAME is variable ``EVENKEEL_EXECUTOR_NAME``, as in
            ``EVENKEEL_KUBERAY_NAMESPACE``, and is found in ``settings.executor_options``. Others are refused.
    """

    settings_read: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, str]] = {}

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
