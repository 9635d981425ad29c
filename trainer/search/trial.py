"""A trial as Ray Tune runs it: a run of its own, whose validation figures are handed on epoch by epoch."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from embeddings.durable_files import write_json
from trainer.runs import run_process
from trainer.runs.directory import RUN_FILE, read_run, write_run
from trainer.runs.protocol import EXIT_FILE, LOG_FILE
from trainer.runs.standby import Standby
from trainer.search.folder import STORE, TRIAL_FILE, SearchFolder, exit_of, figures_of
from trainer.spec import JobSpec
from trainer.spec.problems import InvalidFieldsError

FOLDER, WORKING_DIRECTORY = "folder", "working_directory"
"""Keys of a trial's configuration beside the values of the space."""
POLL_SECONDS = 0.2
STOP_SECONDS = 30.0
"""For a run that is stopped to write its checkpoint."""


class TrialError(RuntimeError):
    """The run of a trial has failed; the message says why."""


class Trial(Trainable):
    """A detached run (trainer.runs.run_process), followed through its events.

    A trial that begins again, after the search was killed, takes up the run where its checkpoints are.
    """

    folder: SearchFolder
    run: Path
    has_begun: bool

    def setup(self, config: dict[str, Any]) -> None:
        # Runs are forked from it: what they import is paid for once, for all trials of this process.
        self._standby = Standby()
        self.has_begun = False
        self.reset_config(config)

    def reset_config(self, config: dict[str, Any]) -> bool:
        """Make this process that of another trial; True, as Ray asks."""
        self._end_run()
        self._values = dict(config)
        # The rows' path is one as the command saw it; Ray has a directory of its own.
        os.chdir(self._values.pop(WORKING_DIRECTORY))
        self.folder = SearchFolder.open(Path(self._values.pop(FOLDER)))
        self.run = self.folder.run_of(self.trial_id)
        self._last: dict[str, Any] = {}
        return True

    def step(self) -> dict[str, Any]:
        """Return the figures of the next epoch; with ``done`` once the run has ended well.

        Raises:
            TrialError: the run has failed.
        """
        if not self.has_begun:
            # Not in setup: Ray may set up two processes for a trial, and steps in one.
            self._begin()
        while True:
            is_over = not run_process.is_alive(self.run)
            for epoch, value in figures_of(self.run, self.folder.metric):
                if epoch > self._last.get("epoch", 0):
                    self._last = {"epoch": epoch, self.folder.metric: math.nan if value is None else value}
                    return self._last
            if is_over:
                self._require_success()
                return {**self._last, "done": True}
            time.sleep(POLL_SECONDS)

    def _begin(self) -> None:
        self.has_begun = True
        self.run.mkdir(parents=True, exist_ok=True)
        try:
            job = self.folder.job_with(self._values)
        except InvalidFieldsError as error:
            write_json(self.run / TRIAL_FILE, {"values": self._values, "error": str(error)})
            raise TrialError(f"the values do not go together: {error}") from None
        write_json(self.run / TRIAL_FILE, {"values": self._values})
        if not run_process.is_alive(self.run) and exit_of(self.run).get("state") != "succeeded":
            self._launch(job)

    def _launch(self, job: JobSpec) -> None:
        again = (self.run / RUN_FILE).exists()
        write_run(
            self.run,
            run_id=f"{self.folder.path.name}-{self.trial_id}",
            attempt=read_run(self.run).attempt + 1 if again else 1,
            job=job,
            dataset=self.folder.dataset,
            store_url=str(self.folder.path / STORE),
        )
        (self.run / EXIT_FILE).unlink(missing_ok=True)
        run_process.launch(self.run, standby=self._standby)

    def _require_success(self) -> None:
        ended = exit_of(self.run)
        if ended.get("state") == "succeeded" and self._last:
            return
        error = ended.get("error", {})
        what = error.get("message") or f"its process has ended as {ended.get('state', 'one that was killed')}"
        raise TrialError(f"{what}. Remedy: {error.get('remedy') or f'see {self.run / LOG_FILE}'}")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing: the run has checkpoints of its own."""

    def cleanup(self) -> None:
        self._end_run()
        self._standby.close()

    def _end_run(self) -> None:
        """End the run, which writes a checkpoint first, if it still trains."""
        if self.has_begun and run_process.is_alive(self.run):
            run_process.terminate(self.run, STOP_SECONDS)
        self.has_begun = False


def values_of(config: dict[str, Any]) -> str:
    """Return the values of a trial's configuration in words."""
    return ", ".join(
        f"{path}={json.dumps(value)}" for path, value in config.items() if path not in (FOLDER, WORKING_DIRECTORY)
    )
