"""An executor of runs that are small processes, ended and watched as those of the host are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from service.jobs.executors.local import LocalRuns
from tests.service import small_run_process
from trainer.runs import run_process
from trainer.runs.protocol import LAUNCHED_VARIABLE, LOG_FILE, RUN_DIR_VARIABLE


class SmallRuns(LocalRuns):
    """Launches small runs, and counts them."""

    def __init__(self) -> None:
        super().__init__((sys.executable, "-m", small_run_process.__name__))
        self.launched: list[Path] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock, self._ended = threading.Lock(), False

    def launch(self, run_dir: Path, /) -> int:
        self.launched.append(run_dir)
        environment = {
            **os.environ,
            RUN_DIR_VARIABLE: str(run_dir.resolve()),
            LAUNCHED_VARIABLE: "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with open(run_dir / LOG_FILE, "ab") as log:
            process = subprocess.Popen(
                [*self._command, str(run_dir)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        with self._lock:
            self._children.append(process)
        if self._ended:
            # The thread of a launch outlives the service whose runner asked for it.
            self.end_all()
            raise OSError("the test is over")
        self.launched_but_not_named()
        run_process.write_process_file(run_dir, process.pid)
        return process.pid

    def launched_but_not_named(self) -> None:
        """A moment for tests to die in."""

    def is_alive(self, run_dir: Path, /) -> bool:
        for child in self._children:
            child.poll()
        return super().is_alive(run_dir)

    def end_all(self) -> None:
        """What a test leaves running ends with it."""
        self._ended = True
        with self._lock:
            for child in self._children:
                child.kill()
                child.wait()
