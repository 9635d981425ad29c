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
from trainer.runs.protocol import LOG_FILE
from trainer.runs.standby import Standby
from trainer.search.folder import STORE, TRIAL_FILE, SearchFolder
from trainer.search.runs import POLL_SECONDS, TrialRun, figures_of
from trainer.spec.problems import InvalidFieldsError

FOLDER, WORKING_DIRECTORY = "folder", "working_directory"
"""Keys of a trial's configuration beside the values of the space."""


class TrialError(RuntimeError):
    """The run of a trial has failed; the message says why."""


class Trial(Trainable):
    """A detached run (trainer.runs.run_process), followed through its events.

    A trial that begins again, after the search was killed, takes up the run where its checkpoints are.
    """

    folder: SearchFolder
    run: TrialRun
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
        self.run = TrialRun(self.folder.run_of(self.trial_id), self._standby)
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
            is_over = not self.run.is_alive
            for epoch, value in figures_of(self.run.path, self.folder.metric):
                if epoch > self._last.get("epoch", 0):
                    self._last = {"epoch": epoch, self.folder.metric: math.nan if value is None else value}
                    return self._last
            if is_over:
                self._require_success()
                return {**self._last, "done": True}
            time.sleep(POLL_SECONDS)

    def _begin(self) -> None:
        self.has_begun = True
        self.run.path.mkdir(parents=True, exist_ok=True)
        try:
            job = self.folder.job_with(self._values)
        except InvalidFieldsError as error:
            write_json(self.run.path / TRIAL_FILE, {"values": self._values, "error": str(error)})
            raise TrialError(f"the values do not go together: {error}") from None
        write_json(self.run.path / TRIAL_FILE, {"values": self._values})
        self.run.begin(
            job, self.folder.dataset, run_id=f"{self.folder.path.name}-{self.trial_id}",
            store_url=str(self.folder.path / STORE),
        )  # fmt: skip

    def _require_success(self) -> None:
        error = self.run.error or (None if self._last else f"no figure. Remedy: see {self.run.path / LOG_FILE}")
        if error is not None:
            raise TrialError(error)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing: the run has checkpoints of its own."""

    def cleanup(self) -> None:
        self._end_run()
        self._standby.close()

    def _end_run(self) -> None:
        """End the run, which writes a checkpoint first, if it still trains."""
        if self.has_begun:
            self.run.end()
        self.has_begun = False


def values_of(config: dict[str, Any]) -> str:
    """Return the values of a trial's configuration in words."""
    return ", ".join(
        f"{path}={json.dumps(value)}" for path, value in config.items() if path not in (FOLDER, WORKING_DIRECTORY)
    )
