"""Trackers by the kind that jobs name. What a kind needs is imported when one is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.runs.directory import Run
from trainer.runs.trackers.base import Tracker
from trainer.runs.trackers.mlflow import MLflowTracker
from trainer.runs.trackers.tensorboard import TensorBoardTracker
from trainer.runs.trackers.wandb import WandbTracker

TRACKERS: dict[str, Callable[[Run, Any], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}
"""Each takes the run and the entry of ``tracking``, a class of trainer.spec.tracking."""
