"""Measurements of a trained model before its run directory is removed: figures for the record, arrays in a file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.format import Checkpoint, checkpoints_in
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.distributed.materialize import read_rows
from trainer.generalization import trainings
from trainer.generalization.trainings import Measure
from trainer.runs.directory import Run


def item_vectors(run: Run, archive: Path) -> dict[str, Any]:
    """Store the item table of every checkpoint that the run kept.

    Arrays: ``ids`` int64 [n], ``steps`` int64 [s] ascending, ``vectors`` float32 [s, n, dim]. Figures:
    ``steps_per_epoch``.
    """
    data = PreparedData.open(run.data)
    table = next(key.table for key in data.keys if key.name == "item")
    dim = run.job.model.embedding_dim
    taken = [Checkpoint(path) for path in reversed(checkpoints_in(run.checkpoints))]
    vectors = [
        np.concatenate([rows.float().numpy() for _, rows in read_rows(run.job, checkpoint, table)])
        for checkpoint in taken
    ]
    np.savez(
        archive,
        ids=np.asarray(data.vocabulary(table)),
        steps=np.array([checkpoint.step for checkpoint in taken]),
        vectors=np.stack([rows[NUM_SPECIAL_ROWS:, :dim] for rows in vectors]),
    )
    return {"steps_per_epoch": data.steps_per_epoch}


def _lazily(module: str, function: str, reads: Callable[[Run], Sequence[Any]]) -> Measure:
    """Return a measure without arrays, whose module is imported at its first use."""

    def measure(run: Run, archive: Path) -> dict[str, Any]:
        figures: dict[str, Any] = getattr(importlib.import_module(module), function)(*reads(run))
        return figures

    return measure


def _subject(run: Run) -> Sequence[Any]:
    return (trainings.subject_of(run),)


MEASURES: dict[str, Measure] = {
    **trainings.MEASURES,
    "als": _lazily("benchmarks.papers.sse.als", "baselines", lambda run: (run.dataset, run.job)),
    "item_vectors": item_vectors,
    "sharpness": _lazily("trainer.generalization.measures", "sharpness", _subject),
    "sse_figures": _lazily("benchmarks.papers.sse.figures", "measures", lambda run: (run,)),
    "tower_by_depth": _lazily("benchmarks.papers.lecture.depth", "by_depth", _subject),
}
"""Measures, keyed by the name in trials."""
