"""What the runner asks of whatever runs its runs. ``tests/contracts/test_executor.py`` says it by example."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol


class Unknown(Exception):
    """The executor cannot be asked just now (its cluster does not answer), so nothing is known of the run: neither that
    it lives nor that it is gone. Nothing is given up for it; what was asked is to be asked again."""


class Room(NamedTuple):
    """What is free on one machine."""

    cpus: float
    memory_bytes: int
    gpus: float


class Executor(Protocol):
    """Runs are named by their run directory, with ``run.json`` in it. Each call may block, and may raise
    :class:`Unknown`."""

    def launch(self, run_dir: Path, /) -> object:
        """Starts the attempt that ``run.json`` names. Raises RuntimeError where a run of this directory is alive,
        OSError or ValueError where it cannot be started, Problem where trying again would not help either."""

    def is_alive(self, run_dir: Path, /) -> bool:
        """Whether the attempt that was launched last still runs, or waits to; brings its log up to date. False for one
        that never was."""

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        """Ends it and all that it left: asked first, forced after ``grace_seconds``. True if it ended by itself. Again,
        or for one that is gone or never was, it clears what is left and returns True."""

    def close(self) -> None:
        """Ends what it keeps beside the runs, which go on. The owner calls it last."""


class Cluster(Executor, Protocol):
    """An executor whose runs are elsewhere: what is free there is not to be seen from here."""

    def room(self) -> list[Room] | None:
        """What is free now, machine by machine; None where the cluster does not tell."""
