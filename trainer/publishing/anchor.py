"""L2 anchor to the version that is served (``publish.anchor``): rows of items are drawn to where consumers know them.

Each row e that a sample looks up of an item that the parent version has adds strength |e - t|^2 to the sample's loss,
with t = n p Q: p the served unit vector, n its norm as that run's model read it, Q the basis of this job. A job that
starts from initial values takes the served basis (Q = 1), which is as good as any other; a job with a parent has the
parent's already, and Q is the orthogonal Procrustes rotation of the served vectors onto the parent's rows. With a
frozen context that is so too where items begin fresh: the context is the parent's. Columns beside the vector (biases,
output vectors) are free, and so are items that the version has not, and what is looked up in pooled lists.

The targets are found once, by the driver, and lie with the run's prepared data: a run that goes on from a checkpoint is
drawn to the same ones, whatever has become of the version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchrec import KeyedTensor

from embeddings.durable_files import appearing
from embeddings.refresh.procrustes import TooFewShared, procrustes
from embeddings.store import open_store
from embeddings.vectors.item_vectors import MISSING, chunks, keys_of
from trainer.checkpoint.format import Checkpoint
from trainer.checkpoint.warm_start import inheritance_of
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.distributed.materialize import stored_rows

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData
    from trainer.runs.directory import Run
    from trainer.spec import JobSpec
    from trainer.spec.publish import Anchor
    from trainer.training.regularizers.rows import RowsOnce

ANCHOR_FILE = "anchor.npy"
CHUNK_ROWS = 1 << 16

Floats = npt.NDArray[np.float32]


def write_targets(run: Run, data: PreparedData, parent: Checkpoint | None) -> str:
    """Write ANCHOR_FILE beside the data of a run that has an anchor, unless it is there; return what to report.

    ``parent``: what the run is warm-started from.

    Raises:
        StoreError: the version cannot be read.
        ValueError: the version has other coordinates, or the parent's rows are others than the job's.
    """
    publish = run.job.publish
    assert publish is not None
    assert publish.anchor is not None
    if run.parent_version is None:
        return f"publish.anchor: collection '{publish.collection}' has no version yet, so rows are free"
    path = data.directory / ANCHOR_FILE
    if path.exists():
        return f"anchored as before to {publish.collection} {run.parent_version}"
    dim = run.job.model.embedding_dim
    table = next(key.table for key in data.keys if key.name == publish.feature)
    version = open_store(run.store_url).collection(publish.collection).open(run.parent_version)
    if version.dim != dim:
        raise ValueError(
            f"publish.anchor: version {run.parent_version} of '{publish.collection}' has {version.dim} coordinates, "
            f"the job's rows {dim}: leave the anchor out for the first version of the new dim"
        )
    num_rows = data.tables[table].num_rows
    keys = keys_of(data.vocabulary(table))
    num_anchored, basis = 0, ""
    with appearing(path, durable=False, fence=run.fence) as file:
        targets = np.lib.format.open_memmap(file, "w+", np.float32, (num_rows, dim))
        for part in chunks(len(keys), CHUNK_ROWS):
            status, vectors = version.lookup(keys[part])
            norms = version.norms[np.maximum(version.find_rows(keys[part]), 0)]
            lengthened = vectors * np.where((status != MISSING) & np.isfinite(norms), norms, 0.0)[:, None].astype(
                np.float32
            )
            num_anchored += int(lengthened.any(axis=1).sum())
            targets[NUM_SPECIAL_ROWS + part.start : NUM_SPECIAL_ROWS + part.stop] = lengthened
        if parent is not None:
            basis = _turned(targets, run, data, table, parent)
        targets.flush()
    return f"anchored to {num_anchored} items of {publish.collection} {run.parent_version}{basis}"


def _turned(targets: Floats, run: Run, data: PreparedData, table: str, parent: Checkpoint) -> str:
    """Turn the targets, in place, into the basis of the parent's rows."""
    inheritance_of(run.job, run.dataset, parent)
    rows_of_parent = data.parent_rows(table)
    # A file without a name: tables are larger than memory.
    scratch = data.directory / f".{ANCHOR_FILE}.parent"
    parent_vectors = np.lib.format.open_memmap(scratch, "w+", np.float32, targets.shape)
    scratch.unlink()
    for part in chunks(len(targets), CHUNK_ROWS):
        parents = rows_of_parent[part]
        into = np.flatnonzero(parents >= 0)
        if len(into):
            first, last = int(parents[into[0]]), int(parents[into[-1]])
            rows = stored_rows(run.job, parent, table, first, last - first + 1).read(table, decay=False)
            parent_vectors[part.start + into] = rows[:, : targets.shape[1]].float().numpy()[parents[into] - first]
    both = np.flatnonzero(targets.any(axis=1) & parent_vectors.any(axis=1) & np.isfinite(parent_vectors).all(axis=1))
    try:
        rotation = procrustes(targets, parent_vectors, source_rows=both, target_rows=both).astype(np.float32)
    except TooFewShared as error:
        raise ValueError(
            f"publish.anchor: the parent's rows cannot be set against the served ones: {error}; or leave the anchor out"
        ) from None
    for part in chunks(len(targets), CHUNK_ROWS):
        targets[part] = targets[part] @ rotation
    return ", in the basis of init_from"


class AnchorPenalty:
    """The penalty strength |e - t|^2 over the rows of items that a sample looks up, where there are targets.

    ``names``: the keys of batches whose rows are items'.
    """

    def __init__(self, settings: Anchor, targets: Floats, names: Sequence[str], dim: int):
        self._strength, self._targets, self._names, self._dim = settings.strength, targets, names, dim

    def __call__(self, batch: Batch, rows: RowsOnce) -> Tensor:
        """Return the penalty of each sample [b]."""
        looked_up = rows.looked_up(batch.features)
        pooled = isinstance(looked_up, KeyedTensor)
        total = None
        for name in self._names:
            ids = batch.features[name].values()
            block = looked_up[name] if pooled else looked_up[name].values()
            target = torch.from_numpy(self._targets[ids.cpu().numpy()]).to(block)
            squares = (block[:, : self._dim] - target).square().sum(1) * target.any(dim=1)
            if not pooled:
                lengths = looked_up[name].lengths()
                owners = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
                squares = squares.new_zeros(len(lengths)).index_add(0, owners, squares)
            total = squares if total is None else total + squares
        assert total is not None
        return self._strength * total


def anchor_penalty(job: JobSpec, data: PreparedData) -> AnchorPenalty | None:
    """Return the penalty of the job, where it has an anchor and its run found targets; else None."""
    if job.publish is None or job.publish.anchor is None:
        return None
    path = data.directory / ANCHOR_FILE
    if not path.exists():
        return None
    targets = np.load(path, mmap_mode="r")
    return AnchorPenalty(job.publish.anchor, targets, _anchored(job, data), job.model.embedding_dim)


def _anchored(job: JobSpec, data: PreparedData) -> list[str]:
    """Return the keys of batches whose rows are anchored."""
    assert job.publish is not None
    if job.model.reads_sequences:
        # Targets and negatives are looked up for what is beside the vector, or are far too many.
        return [job.publish.feature]
    table = next(key.table for key in data.keys if key.name == job.publish.feature)
    # Of a list that is pooled no row is seen by itself.
    return [key.name for key in data.keys if key.table == table and not (key.is_list and job.model.pools)]
