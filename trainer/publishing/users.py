"""Users that a run publishes with its items (``publish.users``): a vector for each, and the items that it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import Array, chunks, keys_of
from embeddings.vectors.user_vectors import SeenLists, UserVectors, take_lists
from trainer.checkpoint.format import Checkpoint
from trainer.data.batches.bags import bags_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.hashing import Int64s
from trainer.data.errors import DataError
from trainer.distributed.materialize import model_of_checkpoint
from trainer.distributed.towers import UserTowerInputs
from trainer.models.base import RankingModel
from trainer.models.next_item import NextItemModel
from trainer.publishing.item_columns import item_columns
from trainer.publishing.query_tower import query_tower
from trainer.publishing.temporary_rows import temporary_rows
from trainer.runs.directory import Run

USERS_AT_ONCE = 4096
HISTORIES_AT_ONCE = 512


@dataclass(frozen=True)
class _Users:
    """Users in any order.

    Attributes:
        keys: ids as keys [n].
        numbers: table rows of the users, or numbers of their sequences [n].
        sides: function from such numbers to vectors [b, at least dim], and the offsets [b] of the scores, if any.
        seen: the items that each user had in training.
        at_once: number of users whose vectors are computed together.
    """

    keys: Array
    numbers: Int64s
    sides: Callable[[Int64s], tuple[Tensor, Tensor | None]]
    seen: SeenLists
    at_once: int


def user_vectors(run: Run, checkpoint: Checkpoint) -> UserVectors:
    """Return the users of a run, ascending by id, as the model of a checkpoint scores items for them.

    For a sequence model they are the users with an item in the training split; the vector is the query of the last of
    these items. For other models they are the users with a row of their own, also those of earlier runs; if the model
    reads other features of the user too, only users with a training row. Vectors are in an unnamed file of the run
    directory. Users with a vector that is not finite are left out, with a note in the log. The model's query tower, if
    any, comes with them.
    """
    data = PreparedData.open(run.data)
    model = model_of_checkpoint(run.job, data, checkpoint)
    if isinstance(model, NextItemModel):
        users = _with_histories(model, data, run.job.model.history_length)
    else:
        users = _with_rows(model, data, has_inputs_alone=run.job.model.reads_pairs)
    order = np.argsort(users.keys, kind="stable")
    vectors = temporary_rows(run.directory, (len(order), run.job.model.embedding_dim))
    offsets = np.zeros(len(order), dtype=np.float32)
    finite = np.zeros(len(order), dtype=np.bool_)
    with torch.no_grad():
        for part in chunks(len(order), users.at_once):
            side, offset = users.sides(users.numbers[order[part]])
            vectors[part] = side[:, : vectors.shape[1]].float().numpy()
            if offset is not None:
                offsets[part] = offset.float().numpy()
            finite[part] = np.isfinite(vectors[part]).all(axis=1) & np.isfinite(offsets[part])
    seen = SeenLists(users.seen.items, *take_lists(users.seen.positions, users.seen.starts, order))
    tower = query_tower(run, checkpoint, model)
    found = UserVectors(
        users.keys[order], vectors, seen, offsets, run.job.model.scores_unit_items,
        tower=tower, columns=_columns(run),
    )  # fmt: skip
    if finite.all():
        return found
    print(f"{np.count_nonzero(~finite)} users are not published: their vectors are not finite", flush=True)
    return found.take(np.flatnonzero(finite))


def _columns(run: Run) -> ItemColumns | None:
    try:
        return item_columns(run.dataset)
    except DataError as error:
        # The file was there when the run prepared its data; filters are no reason to throw the training away.
        print(f"no columns of items are published: {error}", flush=True)
        return None


def _with_rows(model: RankingModel, data: PreparedData, *, has_inputs_alone: bool) -> _Users:
    """Return the users with a row in the user table; ``has_inputs_alone``: the model reads only the user's row."""
    table = next(key.table for key in data.keys if key.name == "user")
    inputs = UserTowerInputs(data, "train")
    rows = np.arange(NUM_SPECIAL_ROWS, data.tables[table].num_rows)
    is_shared = sum(key.table == table for key in data.keys) > 1
    if is_shared or (inputs.reads_rows and not has_inputs_alone):
        rows = rows[data.example_counts("user")[rows] > 0]

    def sides(users: Int64s) -> tuple[Tensor, Tensor | None]:
        bags = bags_of(data.keys, {"user": users}, len(users)) if has_inputs_alone else inputs.bags(users)
        return model.user_side(bags), model.user_offsets(bags)

    seen, items = data.seen_items
    # Pairs are sorted by user, so the lists of all users follow one another.
    _, positions = seen.pairs()
    positions, starts = take_lists(positions, np.asarray(seen.starts), rows)
    keys = keys_of(data.vocabulary(table))[rows - NUM_SPECIAL_ROWS]
    return _Users(keys, rows, sides, SeenLists(_item_keys(data, items), positions, starts), USERS_AT_ONCE)


def _item_keys(data: PreparedData, items: Int64s) -> Array:
    """Return the ids of ``items``: positions in the catalogue, or rows of the item table."""
    if data.catalogue is not None:
        return keys_of(data.catalogue.ids)[items]
    table = next(key.table for key in data.keys if key.name == "item")
    return keys_of(data.vocabulary(table))[np.asarray(items) - NUM_SPECIAL_ROWS]


def _with_histories(model: NextItemModel, data: PreparedData, length: int) -> _Users:
    """Return the users with an item in training; their vectors read the last ``length`` of these items."""
    train = data.sequences.train
    numbers = np.flatnonzero(train.lengths > 0)

    def sides(sequences: Int64s) -> tuple[Tensor, Tensor | None]:
        features = bags_of(data.keys, {"item": train.take(sequences).last(length)}, len(sequences))
        return model.queries(model.embeddings(features)), None

    had = train.take(numbers)
    is_known = had.values >= NUM_SPECIAL_ROWS
    starts = np.append(0, np.cumsum(is_known))[had.offsets]
    positions = had.values[is_known].astype(np.int64) - NUM_SPECIAL_ROWS
    items = keys_of(data.vocabulary(data.keys[0].table))
    keys = keys_of(data.sequences.user_ids())[numbers]
    return _Users(keys, numbers, sides, SeenLists(items, positions, starts), HISTORIES_AT_ONCE)
