"""Measures of a trained model, taken before its run directory goes: figures for the record, arrays in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.format import Checkpoint, checkpoints_in, latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.distributed.materialize import read_rows
from trainer.runs.directory import Run

Measure = Callable[[Run, Path], dict[str, Any]]
"""``measure(run, file of arrays)``: figures that JSON can hold."""


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


def generalization(run: Run, path: Path) -> dict[str, Any]:
    """Return all of :mod:`trainer.generalization.measures`; keep arrays as :func:`outputs` does."""
    from trainer.generalization.measures import measures

    return measures(_kept(run, path))


def random_fit(run: Run, path: Path) -> dict[str, Any]:
    """Return :func:`trainer.generalization.measures.random_fit`; keep no arrays."""
    from trainer.generalization.measures import random_fit as fit

    return fit(_subject(run))


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

    return by_depth(_subject(run))


def sharpness(run: Run, path: Path) -> dict[str, Any]:
    """Return :func:`trainer.generalization.measures.sharpness`; keep no arrays."""
    from trainer.generalization.measures import sharpness as near

    return near(_subject(run))


def outputs(run: Run, path: Path) -> dict[str, Any]:
    """Keep arrays, and return no figures.

    They are what uniform stability compares (:func:`trainer.generalization.subject.arrays_of`).
    """
    _kept(run, path)
    return {}


def _subject(run: Run) -> Any:
    from trainer.generalization.subject import Subject

    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    return Subject(run, checkpoint)


def _kept(run: Run, path: Path) -> Any:
    from trainer.generalization.subject import keep

    subject = _subject(run)
    keep(path, subject)
    return subject


MEASURES: dict[str, Measure] = {
    "als": als,
    "item_vectors": item_vectors,
    "generalization": generalization,
    "outputs": outputs,
    "random_fit": random_fit,
    "sharpness": sharpness,
    "sse_figures": sse_figures,
    "tower_by_depth": tower_by_depth,
}
"""By the name that a trial has for it."""
