"""Tasks on which CTR libraries are compared: rows and models.

Every library gets the rows as :func:`trainer.data.prepare.preparation.prepare` coded and split them: the same
vocabularies (row 0 of a table is padding, row 1 the unknown id), the same training, validation and test rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.data import documents
from benchmarks.papers.data.quick_data import write_quick_data
from benchmarks.pipeline import write_log
from trainer.data.batches.prepared import PreparedData
from trainer.metrics import auc
from trainer.spec import DatasetSpec, JobSpec

MODELS = ("dnn", "dcnv2", "deepfm")
CROSS_LAYERS = 2
DENSE_LEARNING_RATE = 0.001
"""Learning rate of Adam for the dense part if the tables have rowwise Adagrad, ours or TorchRec's."""
HELD_OUT = ("validation", "test")
NO_SPLIT = {"split": {"kind": "random", "validation": 0.0, "test": 0.0}}


@dataclass(frozen=True)
class Task:
    """Rows, and how models are trained and evaluated on them. ``hidden``: layers of the tower."""

    name: str
    dataset: DatasetSpec
    batch_size: int
    epochs: int
    evaluation: dict[str, Any]
    dim: int = 16
    hidden: tuple[int, ...] = (128, 64)

    def job(
        self, model: str, seed: int, learning_rate: float, threads: int, optimizer: str = "adam_ar",
        moments: str = "dense",
    ) -> JobSpec:  # fmt: skip
        """Return our job: a row optimizer on the tables, Adam on the rest. ``moments``: those of Adam and AdamAR.

        AdamAR has the default alpha. Adam has the tables' learning rate, or DENSE_LEARNING_RATE if the tables have
        rowwise Adagrad.
        """
        is_adam = optimizer != "rowwise_adagrad"
        dense_rate = learning_rate if is_adam else DENSE_LEARNING_RATE
        structure = {"structure": "parallel", "cross_layers": CROSS_LAYERS} if model == "dcnv2" else {}
        rows = {"kind": optimizer, "learning_rate": learning_rate, **({"moments": moments} if is_adam else {})}
        return documents.job(
            f"{self.name} {model}",
            self.dataset,
            model={"kind": model, "embedding_dim": self.dim, "hidden": list(self.hidden), **structure},
            optimizer=rows | ({"decay": "at_read"} if optimizer == "adam_ar" else {}),
            dense_optimizer={"kind": "adam", "learning_rate": dense_rate},
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=seed,
            evaluation=self.evaluation,
            # Peers write no checkpoints. The one at the end is not timed.
            checkpoint={"every_steps": 1_000_000, "keep_last": 1},
            resources={"cpus_per_worker": threads},
        )


def quality_tasks(data: Path) -> dict[str, Task]:
    """Return the data sets on which AUC is compared; ``data`` is the folder of their files."""
    ml1m = documents.dataset("ml1m", data / "ml1m.parquet", {"rule": "rating >= 4"}, order="pos")
    return {
        "amazon_sports": Task("amazon_sports", documents.amazon_sports(data), 512, 4, documents.LAST_ITEMS),
        "ml1m": Task("ml1m", ml1m, 1024, 3, documents.RANDOM),
    }


def quick_task(folder: Path) -> Task:
    """Write a small log of the project's own generator to ``folder``, and return its task."""
    write_quick_data(folder)
    return Task("quick", documents.click_log(folder), 256, 2, documents.RANDOM, dim=8, hidden=(32,))


def speed_task(folder: Path, num_features: int, num_ids: int, dim: int, batch_size: int) -> Task:
    """Return a task of ``num_features`` tables, each with ``num_ids`` ids, all of which occur.

    Half of the ids are Zipf.
    """
    path = folder / f"log-{num_ids}.parquet"
    if not path.exists():
        write_log(path, 2 * num_ids, num_features, num_ids)
    features = {f"f{feature}": {"type": "id"} for feature in range(num_features)}
    dataset = documents.dataset("log", path, {"column": "click"}, features)
    return Task(f"speed-{num_ids}", dataset, batch_size, 1, NO_SPLIT, dim, hidden=(256, 128))


def auc_of(scores: np.ndarray, data: PreparedData, split: str) -> float:
    """Return the AUC of scores in row order."""
    return float(auc(np.asarray(scores, np.float32).ravel(), np.asarray(data.labels(split), np.float32)))
