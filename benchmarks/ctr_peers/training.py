"""One training of a library on a task's rows: the libraries, their optimizers, the start of the search for rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ctr_peers import deepctr, ours, torchrec
from benchmarks.ctr_peers.tasks import HELD_OUT, MODELS, Task
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.launch.worker import use_threads

OURS, DEEPCTR, TORCHREC = "ours", "deepctr_torch", "torchrec"
OPTIMIZERS = {OURS: "adam_ar", "ours_adam": "adam", "ours_rowwise_adagrad": "rowwise_adagrad"}
LIBRARIES = (*OPTIMIZERS, DEEPCTR, TORCHREC)
SAME_OPTIMIZER = {"ours_adam": DEEPCTR, "ours_rowwise_adagrad": TORCHREC}
PEERS: dict[str, Any] = {DEEPCTR: deepctr, TORCHREC: torchrec}
HALF_DECADE = math.sqrt(10.0)
ADAM_MIDDLE, ADAGRAD_MIDDLE = 1e-3, HALF_DECADE * 1e-2
MIDDLE = dict.fromkeys((OURS, "ours_adam", DEEPCTR), ADAM_MIDDLE) | dict.fromkeys(
    ("ours_rowwise_adagrad", TORCHREC), ADAGRAD_MIDDLE
)
"""Learning rate at which the search begins: Adam's default, or a common rate of rowwise Adagrad."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The folder for the files of runs, and the function that reports each."""

    folder: Path
    tell: Callable[[Line], None]
    threads: int


def prepared(task: Task, seed: int, place: Place) -> Path:
    """Return the folder of a seed's rows, coded and split as a job of ours prepares them, once."""
    folder = place.folder / f"{task.name}-{seed}"
    prepare(task.dataset, task.job(MODELS[0], seed, MIDDLE[OURS], place.threads), folder)
    return folder


def train(task: Task, library: str, model: str, seed: int, rate: float, place: Place) -> Line:
    """Train, and return the AUC after each epoch, by held-out split."""
    if library in OPTIMIZERS:
        job = task.job(model, seed, rate, place.threads, OPTIMIZERS[library])
        events = ours.events_of(task.dataset, job, place.folder, prepared(task, seed, place))
        return {split: ours.aucs(events, split) for split in HELD_OUT}
    use_threads(place.threads)
    torch.manual_seed(seed)
    found: Line = PEERS[library].run(task, model, seed, rate, PreparedData.open(prepared(task, seed, place)))
    return found
