"""Tracker that writes to Weights & Biases with the package ``wandb``."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from embeddings.durable_files import write_json
from trainer.runs.directory import Run
from trainer.runs.trackers.base import Point, TrackerUnusableError, parameters_of
from trainer.spec.tracking import WandbTracking

STEPS_FILE = "wandb.json"

START_SECONDS = 30.0


class WandbTracker:
    """Tracker of the Weights & Biases run that has this run's id; all attempts share it.

    In offline mode no server knows the points that it has, so STEPS_FILE in the run's directory records them.
    STEPS_FILE is written before points are sent: after a crash a missing point does less harm than a point sent twice.
    """

    def __init__(self, run: Run, spec: WandbTracking):
        try:
            import wandb
        except ImportError as error:
            raise TrackerUnusableError(f"{error.name} is not installed: pip install 'evenkeel[wandb]'") from error
        logging.getLogger("wandb").setLevel(logging.ERROR)
        self._file = run.directory / STEPS_FILE
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=run.run_id,
            name=run.run_id,
            group=run.job.name,
            tags=[f"{name}={value}"[:64] for name, value in run.job.labels.items()],
            config=parameters_of(run),
            dir=str(run.directory),
            resume="allow",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, init_timeout=START_SECONDS
            ),
        )
        for split in ("train/*", "*"):
            self._run.define_metric(split, step_metric="step" if split == "train/*" else "epoch")
        self._last: dict[str, int] = {}
        if self._file.exists():
            self._last = json.loads(self._file.read_text("utf-8"))

    def last_steps(self) -> dict[str, int]:
        return dict(self._last)

    def log(self, points: Sequence[Point]) -> None:
        self._last |= {point.name: point.step for point in points}
        write_json(self._file, self._last)
        rows: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for point in points:
            rows["step" if point.name.startswith("train/") else "epoch", point.step][point.name] = point.value
        for (axis, step), values in rows.items():
            self._run.log({**values, axis: step})

    def end(self, state: str | None, tags: Mapping[str, str]) -> None:
        self._run.summary.update({"state": state or "killed", **tags})
        self._run.finish(exit_code=0 if state == "succeeded" else 1)

    def close(self) -> None:
        """Do nothing: only :meth:`end` finishes the run."""
