"""Measures of a trained model, taken before its run directory goes: figures for the record, arrays in a file."""

from __future__ import annotations

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
    """Keep the item table as of every checkpoint that the run kept.

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


def als(run: Run, path: Path) -> dict[str, Any]:
    """Return :func:`benchmarks.papers.sse.als.baselines`, which asks the run for its rows alone; keep no arrays."""
    from benchmarks.papers.sse.als import baselines

    return baselines(run.dataset, run.job)


def sse_figures(run: Run, path: Path) -> dict[str, Any]:
    """Return :func:`benchmarks.papers.sse.figures.measures`; keep no arrays."""
    from benchmarks.papers.sse.figures import measures

    return measures(run)


def tower_by_depth(run: Run, path: Path) -> dict[str, Any]:
    """Return :func:`trainer.generalization.measures.by_depth`; keep no arrays."""
    from trainer.generalization.measures import by_depth

    return by_depth(trainings.subject_of(run))


def sharpness(run: Run, path: Path) -> dict[str, Any]:
    """Return :func:`trainer.generalization.measures.sharpness`; keep no arrays."""
    from trainer.generalization.measures import sharpness as near

    return near(trainings.subject_of(run))


MEASURES: dict[str, Measure] = {
    **trainings.MEASURES,
    "als": als,
    "item_vectors": item_vectors,
    "sharpness": sharpness,
    "sse_figures": sse_figures,
    "tower_by_depth": tower_by_depth,
}
"""By the name that a trial has for it."""
