"""The interface between the runner and what executes runs; ``tests/contracts/test_executor.py`` shows it by example."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol


class ExecutorUnavailable(Exception):
    """The executor cannot be reached now (its cluster does not answer), so the state of the run is unknown.

    It may be alive or gone: do not give it up, and ask again later.
    """


class FreeResources(NamedTuple):
    """Free resources of one machine."""

    cpus: float
    memory_bytes: int
    gpus: float


class Executor(Protocol):
    """Executes runs, each identified by its run directory, which contains ``run.json``.

    Each call may block, and may raise :class:`ExecutorUnavailable`.
    """

    def launch(self, run_dir: Path, /) -> object:
        """Start the attempt that ``run.json`` names.

        Raises:
            RuntimeError: A run of this directory is alive.
            OSError: The attempt cannot be started.
            ValueError: The attempt cannot be started.
            Problem: The attempt cannot be started, and trying again would not help.
        """

    def is_alive(self, run_dir: Path, /) -> bool:
        """Tell whether the attempt launched last is running or waiting to run, and update its log.

        The answer is False for an attempt that was never launched.
        """

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        """End the attempt and everything it left behind; return True if it ended by itself.

        The attempt is first asked to end, then forced after ``grace_seconds``. A repeated call, or one for an attempt
        that is gone or never existed, removes what is left and returns True.
        """

    def close(self) -> None:
        """Release what the executor holds beside the runs, which continue; the owner calls this last."""


class Cluster(Executor, Protocol):
    """An executor whose runs are elsewhere, so that free resources cannot be seen from this machine."""

    def room(self) -> list[FreeResources] | None:
        """Return what is free now on each machine; None if the cluster does not report it."""
