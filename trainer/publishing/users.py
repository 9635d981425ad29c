"""Users that a run publishes with its items (``publish.users``): a vector for each, and the items that it had."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import Array, chunks, keys_of
from embeddings.vectors.user_vectors import SeenLists, UserVectors, take_lists
from trainer.checkpoint.format import Checkpoint
from trainer.data.batches.bags import bags_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns import values
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.hashing import Int64s
from trainer.data.errors import DataError
from trainer.data.sources.source import Source, beside
from trainer.data.sources.types import element_type
from trainer.distributed.materialize import model_of_checkpoint
from trainer.distributed.towers import UserTowerInputs
from trainer.models.base import RankingModel
from trainer.models.next_item import NextItemModel
from trainer.publishing.query_tower import query_tower
from trainer.runs.directory import Run
from trainer.spec import DatasetSpec, Feature

USERS_AT_ONCE = 4096
HISTORIES_AT_ONCE = 512


@dataclass(frozen=True)
class _Users:
    """Users in any order, by ``keys`` [n] and ``numbers`` [n]: their rows of the table, or their sequences.

    ``sides``: function from such numbers to vectors [b, at least dim], and the offsets [b] of the scores, if any.
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
        return _item_columns(run.dataset)
    except DataError as error:
        # The file was there when the run prepared its data; filters are no reason to throw the training away.
        print(f"no columns of items are published: {error}", flush=True)
        return None


def _item_columns(dataset: DatasetSpec) -> ItemColumns | None:
    """Return the item table's features that are ids or lists of ids, read from its file; None if there are none."""
    if dataset.items is None:
        return None
    chosen = {
        name: feature
        for name, feature in dataset.items.features.items()
        if feature.type in ("id", "id_list") and feature.calendar is None
    }
    if not chosen:
        return None
    source = Source(beside(dataset.items.uri, dataset.uri), ids=dataset.items.id_columns)
    names = [dataset.items.on, *(feature.column or name for name, feature in chosen.items())]
    source.require(names)
    kinds = {
        name: values.id_kind(element_type(source.column_type(name)), f"{source.uri}, column '{name}'") for name in names
    }
    keys: list[pa.Array] = [pa.array([], _values_type(kinds[dataset.items.on]))]
    parts: dict[str, list[pa.Array]] = {name: [] for name in chosen}
    for chunk in source.stream(list(dict.fromkeys(names))):
        keys.append(values.as_ids(chunk.column(names[0]), kinds[names[0]], chunk.where(names[0])).cast(keys[0].type))
        for name, feature in chosen.items():
            parts[name].append(_ids(chunk, feature, feature.column or name, kinds[feature.column or name]))
    columns = {name: pa.concat_arrays(part) for name, part in parts.items() if part}
    return ItemColumns(keys_of(pa.concat_arrays(keys)), columns) if columns else None


def _values_type(kind: values.Kind) -> pa.DataType:
    return pa.int64() if kind == "int" else pa.large_string()


def _ids(chunk: values.Chunk, feature: Feature, column: str, kind: values.Kind) -> pa.Array:
    """Return a feature's ids in a chunk: int64 or large_string, or large lists of them."""
    if not feature.is_list:
        return values.as_ids(chunk.column(column), kind, chunk.where(column)).cast(_values_type(kind))
    elements, lengths = values.as_lists(chunk, column)
    ids = values.as_ids(elements, kind, chunk.where(column)).cast(_values_type(kind))
    return pa.LargeListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int64()), ids)


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


def temporary_rows(directory: Path, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return a writable float32 array in an unnamed file, whose disk space is allocated at once.

    Raises:
        OSError: the disk is full. Without allocation, a later write to the array would crash the process instead.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, max(4 * shape[0] * shape[1], 1))
        return np.memmap(file, np.float32, "r+", shape=shape)
