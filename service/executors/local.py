"""Runs as detached processes of this host: :mod:`trainer.launch` behind the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer import launch
from trainer.standby import Standby


class LocalRuns:
    """``command``: what is started in the place of a training, followed by ``--run-dir D``: each time anew, where a
    training is forked from a process that stands by."""

    def __init__(self, command: Sequence[str] = launch.COMMAND):
        self._command = tuple(command)
        self._standby = Standby() if self._command == launch.COMMAND else None

    def launch(self, run_dir: Path, /) -> int:
        return launch.launch(run_dir, command=self._command, standby=self._standby)

    def is_alive(self, run_dir: Path, /) -> bool:
        return launch.is_alive(run_dir)

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        return launch.terminate(run_dir, grace_seconds)

    def close(self) -> None:
        if self._standby is not None:
            self._standby.close()
