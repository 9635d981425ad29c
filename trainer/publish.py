"""A run's item vectors, from its last checkpoint to the refresh stage. Run by the driver, after the ranks are gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from embeddings.config import TableConfig
from embeddings.stage import publish_candidate
from embeddings.store import open_store
from embeddings.tables import EmbeddingTables
from embeddings.vectors import ItemVectors
from trainer.build import BACKENDS, row_optimizer
from trainer.checkpoint import Checkpoint, CheckpointError, latest_valid
from trainer.data import PreparedData
from trainer.failures import GivenUpError
from trainer.rundir import Run

FIRST_LIVE_ROW = 2
NORM_FLOOR = 1e-12
_CHUNK_ROWS = 1 << 18


def publish(run: Run) -> dict[str, Any]:
    """Hands the run's item vectors to the stage; returns the fields of the publication event.

    Fenced: the version is published only if ``parent_version`` of run.json is still the one that is served, and nothing
    is written if run.json has been taken over by another attempt (GivenUpError).
    """
    spec = run.job.publish
    assert spec is not None
    checkpoint = latest_valid(run.checkpoints)
    if checkpoint is None:
        raise CheckpointError(f"{run.checkpoints} holds no valid checkpoint to publish from: retry the job")
    last_step = run.job.epochs * PreparedData.open(run.data).steps_per_epoch
    if checkpoint.extra["position"]["step"] < last_step:
        raise CheckpointError(
            f"{checkpoint.path} is the newest valid checkpoint, of step {checkpoint.extra['position']['step']} of "
            f"{last_step}: what was saved after it is damaged; retry the job, which trains on from there"
        )
    vectors = item_vectors(run, checkpoint)
    if not run.still_current():
        raise GivenUpError(f"attempt {run.attempt} of run {run.run_id} was given up: its vectors are not published")
    publication = publish_candidate(
        open_store(run.store_url),
        spec.collection,
        vectors,
        spec,
        job_id=run.run_id,
        parent_version=run.parent_version,
        model=run.job.model.kind,
        retired=_retired(run),
    )
    return {
        "status": publication.status,
        "collection": publication.collection,
        "version": publication.version,
        "reasons": publication.reasons,
        "gate": publication.gate,
        "anchor_generation": publication.anchor_generation,
    }


def item_vectors(run: Run, checkpoint: Checkpoint) -> ItemVectors:
    """One row for each id of the published feature's table.

    The vector is the row without pending decay, with its idle momentum (decay changes a row's length, never its
    direction); the norm is that of the row as the model reads it, decay and all. There is evidence for a row that this
    job touched for an example of its own (SSE touches rows at random, for examples of other items) and whose norm is
    above the floor; the stage serves the others as before, or not at all.
    """
    assert run.job.publish is not None
    data = PreparedData.open(run.data)
    table = next(key.table for key in data.keys if key.name == run.job.publish.feature)
    dim = run.job.model.embedding_dim
    num_rows = data.tables[table].num_rows
    first_step = int(checkpoint.extra["position"]["first_step"])
    vectors = np.empty((num_rows - FIRST_LIVE_ROW, dim), dtype=np.float32)
    norms = np.empty(len(vectors), dtype=np.float32)
    last = np.empty(len(vectors), dtype=np.int64)
    for start in range(FIRST_LIVE_ROW, num_rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, num_rows - start)
        part = slice(start - FIRST_LIVE_ROW, start - FIRST_LIVE_ROW + count)
        rows = _rows(run, checkpoint, table, start, count)
        vectors[part] = _as_float32(rows.read(table, decay=False)[:, :dim])
        served = rows.read(table)[:, :dim]
        norms[part] = _as_float32(torch.linalg.vector_norm(served.double(), dim=1))
        last[part] = rows.state(table)["last_update_step"].numpy()
    counts = data.row_counts(table)[FIRST_LIVE_ROW:]
    return ItemVectors(
        data.vocabulary(table),
        vectors,
        norms=norms,
        evidence=(last > first_step) & (counts > 0) & (norms > NORM_FLOOR),
        counts=counts,
    )


def _retired(run: Run) -> pa.Array:
    """The tombstones of the published feature's table: ids whose last vector must not be served for ever."""
    assert run.job.publish is not None
    data = PreparedData.open(run.data)
    table = next(key.table for key in data.keys if key.name == run.job.publish.feature)
    return data.id_map(table).retired


def _rows(run: Run, checkpoint: Checkpoint, table: str, start: int, count: int) -> EmbeddingTables:
    """These rows of the checkpoint, in tables that can read them as of its step."""
    weight, state = checkpoint.read_rows(table, start, count)
    tables = EmbeddingTables(
        [TableConfig(table, count, weight.shape[1], (table,), first_live_row=0)],
        row_optimizer(run.job, checkpoint.extra["alpha"]),
        backend=BACKENDS[run.job.kernel],  # type: ignore[arg-type]  # one that the job trained with
        dtype=weight.dtype,
    )
    tables.load(table, weight, state)
    tables.completed_steps = int(checkpoint.extra["completed_steps"])
    return tables


def _as_float32(values: torch.Tensor) -> npt.NDArray[np.float32]:
    return values.float().numpy()
