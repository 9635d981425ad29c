"""Runs as detached processes of this host: :mod:`trainer.runs.run_process` behind the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.runs import run_process
from trainer.runs.standby import Standby


class LocalRuns:
    """Executes runs on this host.

    ``command`` is started in place of a training, followed by ``--run-dir D``; it is started anew each time, while a
    training is forked from a standby process.
    """

    def __init__(self, command: Sequence[str] = run_process.COMMAND):
        self._command = tuple(command)
        self._standby = Standby() if self._command == run_process.COMMAND else None

    def launch(self, run_dir: Path, /) -> int:
        return run_process.launch(run_dir, command=self._command, standby=self._standby)

    def is_alive(self, run_dir: Path, /) -> bool:
        return run_process.is_alive(run_dir)

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        return run_process.terminate(run_dir, grace_seconds)

    def close(self) -> None:
        if self._standby is not None:
            self._standby.close()
