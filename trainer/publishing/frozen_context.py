"""Frozen context (``publish.frozen_context``): items are trained against the parent's parameters, which stay constant.

If scores are products of item and context vectors, two trainings differ by a rotation, and by more (docs/adr/0039),
because items and context adapt to each other. If the parent's context is frozen, the loss determines the item vectors,
in the parent's basis. (Di Carlo, Bianchi and Palmonari, Training temporal word embeddings with a compass, AAAI 2019.)
The context depends on the model:

======================  ==================================================================
bpr, mf                 rows of users, their bias included
item2vec                the output half u of the items' rows [v | u]
two_tower, CTR models   all tables except the items', and all dense parameters
======================  ==================================================================

Rows of ids that the parent did not have are trained as usual. In a table that is all context, frozen rows get the
values that the parent's model read, and are never updated: training looks them up without recording gradients, and
lookups read a row without updates as it is stored. Frozen output halves have zero state and get no gradient, and an
optimizer without decay leaves such columns unchanged. So sharding, checkpoints, evaluation and resuming need no change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from trainer.checkpoint.format import Checkpoint
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.distributed.materialize import stored_rows
from trainer.distributed.sharded_model import ShardedModel
from trainer.spec import JobSpec

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData
    from trainer.models.base import RankingModel

CHUNK_ROWS = 1 << 18


def is_frozen(job: JobSpec, data: PreparedData) -> bool:
    """Return True if the job sets ``publish.frozen_context``, and some of its ids have a row in the parent."""
    if job.publish is None or job.publish.frozen_context is None:
        return False
    return any((data.parent_rows(name)[NUM_SPECIAL_ROWS:] >= 0).any() for name in data.tables)


def context_tables(job: JobSpec, data: PreparedData) -> dict[str, int]:
    """Return {table with frozen rows: number of its first frozen column}; all later columns are frozen too."""
    assert job.publish is not None
    items = next(key.table for key in data.keys if key.name == job.publish.feature)
    if job.model.has_both_sides_in_rows:
        return {items: job.model.embedding_dim}
    return dict.fromkeys((name for name in data.tables if name != items), 0)


def begins_fresh(job: JobSpec) -> bool:
    """Return True if rows of items begin at initial values although the job has a parent."""
    return (
        job.publish is not None
        and job.publish.frozen_context is not None
        and job.publish.frozen_context.items == "fresh"
    )


def begin(sharded: ShardedModel, parent: Checkpoint, inherited: Checkpoint, job: JobSpec, data: PreparedData) -> None:
    """Copy the parent's parameters that stay frozen into a run's model before its first step. Collective.

    The model must have initial values, or be warm-started from ``parent``. ``inherited``: the parent's checkpoint under
    the names of the job (trainer.distributed.inherited). A resumed run does not call this: its own checkpoints have
    these parameters.

    Raises:
        CheckpointError: on every rank, if the parent's checkpoint cannot be loaded on any.
    """

    def take() -> None:
        if begins_fresh(job):
            if dist.get_rank() == 0:
                parent.verify()
            sharded.load_dense(inherited)
        _take_context(sharded, parent, job, data)

    sharded.agreed(f"{parent.path} cannot be loaded", take)


def _take_context(sharded: ShardedModel, parent: Checkpoint, job: JobSpec, data: PreparedData) -> None:
    """Copy the parent's values of frozen parameters, as looked up, into the model, with zero optimizer state."""
    for name, first_column in context_tables(job, data).items():
        rows_of_parent = torch.from_numpy(data.parent_rows(name).copy())
        for piece in sharded.local_pieces():
            if piece.name != name or piece.column_start + piece.column_count <= first_column:
                continue
            columns = slice(max(first_column - piece.column_start, 0), piece.column_count)
            for start in range(0, piece.row_count, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, piece.row_count)
                parents = rows_of_parent[piece.row_start + start : piece.row_start + stop]
                into = torch.nonzero(parents >= 0).flatten()
                if not len(into):
                    continue
                first, last = int(parents[into[0]]), int(parents[into[-1]])
                read = stored_rows(job, parent, name, first, last - first + 1).read(name)
                taken = read[parents[into] - first][:, piece.column_start : piece.column_start + piece.column_count]
                weight, state = piece.tables.weight(name), piece.tables.state(name)
                rows = (start + into).to(weight.device)
                weight[rows, columns] = taken[:, columns].to(weight)
                for value in state.values():
                    if value.dim() == 2:
                        value[rows, columns] = 0
                    elif first_column == 0:
                        value[rows] = 0


def freeze_dense(sharded: ShardedModel) -> None:
    """Turn off gradients of all parameters outside the tables."""
    for _, parameter in sharded.dense_parameters():
        parameter.requires_grad_(False)


class FrozenContext(nn.Module):
    """Stand-in for a model's ``embeddings`` while a step's loss is computed: lookups of frozen rows record nothing.

    ``masks``: feature that reads frozen rows -> bool [num_rows], True for these rows. ``own_half``: True if the columns
    from ``dim`` on of the items' rows are frozen, and the first ``dim`` columns are trained; False if whole tables are.
    """

    def __init__(self, embeddings: nn.Module, masks: dict[str, Tensor], dim: int, own_half: bool):
        super().__init__()
        # In a tuple: as a submodule, its parameters would be registered twice.
        self._embeddings, self._masks, self._dim, self._own_half = (embeddings,), masks, dim, own_half

    def forward(self, features: KeyedJaggedTensor) -> Any:
        embeddings = self._embeddings[0]
        if self._own_half:
            rows = _wait(embeddings(features))
            return {name: self._without_context(part, features[name]) for name, part in rows.items()}
        frozen, trained = (self._part(features, of_frozen) for of_frozen in (True, False))
        with torch.no_grad():
            fixed = _wait(embeddings(frozen))
        rows = _wait(embeddings(trained))
        # Both results have their blocks in the same order, that of the plan.
        return KeyedTensor(rows.keys(), rows.length_per_key(), rows.values() + fixed.values())

    def _without_context(self, part: JaggedTensor, ids: JaggedTensor) -> JaggedTensor:
        values, mask = part.values(), self._masks[next(iter(self._masks))]
        frozen = mask[ids.values().cpu()].to(values.device)[:, None]
        context = values[:, self._dim :]
        context = torch.where(frozen, context.detach(), context)
        return JaggedTensor(torch.cat([values[:, : self._dim], context], dim=1), lengths=part.lengths())

    def _part(self, features: KeyedJaggedTensor, of_frozen: bool) -> KeyedJaggedTensor:
        """Return ``features`` with only ids of frozen rows, or only ids of trained rows if ``of_frozen`` is False."""
        keys, chosen_parts, lengths = features.keys(), [], []
        for name in keys:
            ids = features[name]
            mask = self._masks.get(name)
            values = ids.values().cpu()
            frozen = torch.zeros(len(values), dtype=torch.bool) if mask is None else mask[values]
            is_chosen = frozen if of_frozen else ~frozen
            chosen_parts.append(is_chosen)
            sizes = ids.lengths().cpu()
            owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            lengths.append(torch.zeros_like(sizes).index_add(0, owners, is_chosen.to(sizes.dtype)))
        chosen = torch.cat(chosen_parts).to(features.values().device)
        weights = features.weights_or_none()
        return KeyedJaggedTensor(
            keys,
            features.values()[chosen],
            None if weights is None else weights[chosen],
            lengths=torch.cat(lengths).to(features.values().device),
            stride=features.stride(),
        )


def _wait(rows: Any) -> Any:
    # Sharded tables return an awaitable of rows.
    return rows.wait() if hasattr(rows, "wait") else rows


class FrozenRows:
    """The frozen rows of a job: rows of :func:`context_tables` whose ids the parent had, by the prepared ``data``."""

    def __init__(self, job: JobSpec, data: PreparedData):
        self._dim, self._own_half = job.model.embedding_dim, job.model.has_both_sides_in_rows
        tables = context_tables(job, data)
        masks = {name: torch.from_numpy(data.parent_rows(name) >= 0) for name in tables}
        self._masks = {key.name: masks[key.table] for key in data.keys if key.table in tables}

    @contextlib.contextmanager
    def frozen_in(self, model: RankingModel) -> Iterator[None]:
        """Within the block, make the model's lookups of frozen rows record no gradients."""
        embeddings = model.embeddings
        model.embeddings = FrozenContext(embeddings, self._masks, self._dim, self._own_half).train(model.training)
        try:
            yield
        finally:
            model.embeddings = embeddings
