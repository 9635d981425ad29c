"""L2 anchor to the served version (``publish.anchor``): a penalty that keeps items' rows near the served vectors.

If a sample looks up the row e of an item that the served version has, strength |e - t|^2 is added to the sample's loss.
The target is t = n p Q: p is the served unit vector, n its norm as that run's model read it, and Q a rotation into the
basis of this job. A job that starts from initial values takes the served basis, Q = 1. A job with a parent has the
parent's basis: Q is the orthogonal Procrustes rotation of the served vectors onto the parent's rows. The same holds for
a frozen context whose items begin fresh, because the context is the parent's. There is no penalty on columns after the
vector (biases, output vectors), on items that the version lacks, or on rows of pooled lists.

The driver computes the targets once, and writes them next to the run's prepared data. So an attempt that resumes from a
checkpoint has the same targets, even if the version has been removed.
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
    """Write ANCHOR_FILE into the data folder of a run with an anchor, unless it exists; return a message for the log.

    The file is a float32 array [num_rows, dim] of targets, zeros for rows without a target. ``parent``: the checkpoint
    of the run's warm start, if any.

    Raises:
        StoreError: the version cannot be read.
        ValueError: the version has another dimension than the job, or too few ids in common with the parent's rows.
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
    """Rotate the targets, in place, into the basis of the parent's rows; return words for the log message."""
    inheritance_of(run.job, run.dataset, parent)
    rows_of_parent = data.parent_rows(table)
    # A file without a name, because tables may be larger than memory.
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
            f"publish.anchor: the parent's rows cannot be aligned with the served rows: {error}; "
            "or leave the anchor out"
        ) from None
    for part in chunks(len(targets), CHUNK_ROWS):
        targets[part] = targets[part] @ rotation
    return ", in the basis of init_from"


class AnchorPenalty:
    """The penalty strength |e - t|^2, summed over the rows of items that a sample looks up and that have a target.

    ``targets``: [num_rows, dim], zeros for rows without a target. ``names``: the keys of batches that look up items.
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
    """Return the anchor penalty of the job; None if it has no anchor, or its run has no file of targets."""
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
        # Keys of targets and negatives read columns after the vector, or have far too many rows.
        return [job.publish.feature]
    table = next(key.table for key in data.keys if key.name == job.publish.feature)
    # A pooled list has only the sum or mean of its rows, not each row.
    return [key.name for key in data.keys if key.table == table and not (key.is_list and job.model.pools)]
