"""Comparison of the job's model with the served version's, on held-out rows that neither was trained on.

The trained model scores the rows. Then the served model's table rows and dense parameters are loaded into it, whatever
their sharding plan was, and it scores the same rows (:mod:`trainer.evaluation.scored_by_both`). Only rows whose ids
both models know are compared, so that new items, which the served model does not know, do not decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from embeddings.refresh.model_comparison import ModelDifference
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.warm_start import id_maps, numeric_features, rows_of_parent, vectors_read
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, hashes_of
from trainer.data.columns.numeric import open_numeric
from trainer.distributed.inherited import InheritedCheckpoint
from trainer.evaluation.evaluator import Evaluator
from trainer.evaluation.held_out_by_both import Known, NotComparableError, choose, splits_of_both
from trainer.evaluation.scored_by_both import MIN_ROWS, scorer_of
from trainer.spec import DatasetSpec, JobSpec

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData
    from trainer.distributed.dynamic_tables import DynamicRows
    from trainer.distributed.sharded_model import ShardedModel


class ServedRows(NamedTuple):
    """Map from the rows of the model to those of the served model's checkpoint.

    ``rows``: table -> number of the checkpoint's row to load into each row of the model, int64 [num_rows], -1 for
    none; :meth:`ShardedState.load_from` reads it. ``known``: table -> flags of the codes whose id both models know.
    """

    rows: dict[str, torch.Tensor]
    known: Known


def differences(
    job: JobSpec, dataset: DatasetSpec, data: PreparedData, sharded: ShardedModel, dynamic_rows: DynamicRows,
    evaluator: Evaluator, served: Checkpoint, *, is_start: bool,
) -> tuple[ModelDifference, ...]:  # fmt: skip
    """Return the differences between a trained model and the served model on rank 0, () elsewhere. Collective.

    ``sharded`` and ``dynamic_rows`` hold the served model, or undefined values, after the call. ``served`` is the last
    checkpoint of the served version's job. ``is_start``: True if the job started from this checkpoint; the prepared
    data then have the map to its rows.

    Raises:
        NotComparableError: on every rank, if the models cannot be compared.
    """
    try:
        inherited = InheritedCheckpoint(served, job, dataset, sharded)
    except (ValueError, CheckpointError) as error:
        # Without the remedy, which is for warm starts.
        raise NotComparableError(str(error).partition(": use ")[0]) from None
    where = _rows_by_start(job, data, dynamic_rows, inherited) if is_start else _rows_by_id(job, data, inherited)
    chosen = choose(data, splits_of_both(job, dataset, data, served), where.known)
    scorer = scorer_of(job, dataset, data, evaluator, dynamic_rows, chosen, where.known)
    sharded.eval()
    candidate, ranked = scorer.score(), scorer.ndcg()
    # Rows that the served model lacks get initial values: their last steps may be later than the served model's step.
    sharded.reset_tables()
    try:
        sharded.load_from(inherited, verify=False, parent_rows=where.rows)
        dynamic_rows.load(inherited, is_own=False)
        inherited.clear_new_tables(sharded)
    except CheckpointError as error:
        raise NotComparableError(str(error)) from None
    before, ranked_before = scorer.score(), scorer.ndcg()
    if candidate is None or before is None:
        return ()
    for name, scores in (("served", before), ("new", candidate)):
        if not np.isfinite(scores).all():
            raise NotComparableError(f"a score of the {name} model is not finite")
    found = scorer.differences(before, candidate)
    if ranked is None or ranked_before is None or len(ranked.values) < MIN_ROWS:
        return found
    return *found, ranked.difference_from(ranked_before)


# --- the served model ------------------------------------------------------------------------------------------------


def _rows_by_start(job: JobSpec, data: PreparedData, dynamic_rows: DynamicRows, served: Checkpoint) -> ServedRows:
    """Return the map from the job's rows to those of the served model, which the job started from."""
    rows = rows_of_parent(job, data, served.tables)
    # A table that the served model does not have makes none of its ids unknown.
    known = {name: (part.numpy() >= 0) | (name not in served.tables) for name, part in rows.items()}
    if dynamic_rows.ids:
        before = id_maps(served)
        for name, ids in dynamic_rows.ids.items():
            if name not in before:
                continue
            keys = data.row_keys(name)
            known[name] = (ids.find(keys.view(np.int64)) >= 0) & np.isin(keys, hashes_of(before[name].ids))
            known[name][:NUM_SPECIAL_ROWS] = True
    return ServedRows(rows, known)


def _rows_by_id(job: JobSpec, data: PreparedData, served: Checkpoint) -> ServedRows:
    """Return the map to rows of any other served model, by the rows' ids."""
    dynamic = [name for name, table in job.tables.items() if table.id_map is not None]
    if dynamic:
        raise NotComparableError(f"the job did not start from it, and table {dynamic[0]} has a capacity")
    numeric = () if data.numeric_path is None else open_numeric(data.numeric_path)
    if numeric != numeric_features(served) or data.vectors != vectors_read(served):
        raise NotComparableError("its numeric features or vectors are scaled differently from the job's")
    rows = {}
    for name, ids in id_maps(served).items():
        own = data.row_keys(name)[NUM_SPECIAL_ROWS:]
        _, here, there = np.intersect1d(own, hashes_of(ids.ids), assume_unique=True, return_indices=True)
        found = np.append(np.arange(NUM_SPECIAL_ROWS), np.full(len(own), -1))
        found[here + NUM_SPECIAL_ROWS] = there + NUM_SPECIAL_ROWS
        rows[name] = torch.from_numpy(found)
    for name in data.tables.keys() - rows.keys():
        rows[name] = torch.full([data.tables[name].num_rows], -1)
    known = {name: (part.numpy() >= 0) | (name not in served.tables) for name, part in rows.items()}
    return ServedRows(rows, known)
