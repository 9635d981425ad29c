"""One row for each user with all items in order, from rows of single events. Torch-free; holds the events in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns import values
from trainer.data.columns.labels import labels_of
from trainer.data.columns.orders import as_order, order_of
from trainer.data.columns.values import Kind
from trainer.data.sources.source import Chunk, Source
from trainer.spec import DatasetSpec, Label


def are_events(source: Source, dataset: DatasetSpec, *, timed: bool = True) -> bool:
    """Return True if rows are single events, as training reads them: an item (no list), a user and a time.

    ``timed``: False if events need no time.
    """
    there, columns = source.column_names(), _columns(dataset, timed)
    if any(name not in there for name in columns):
        return False
    source.require(columns)
    return not values.is_list(source.column_type(columns[1]))


BadEvents = Callable[[Chunk, Mapping[str, Kind], Label | None], npt.NDArray[np.bool_]]


def users_of(
    source: Source, dataset: DatasetSpec, bad_events: BadEvents | None = None, *, timed: bool = True
) -> pa.Table:
    """Return columns of the features user and item: each user once, with a list of items by time (then by row).

    Users are in the order of first appearance. As in training, rows without a user or an item are left out. If events
    are timed and have the label's column, rows that are not positive are left out too.

    Args:
        source: the rows.
        dataset: describes the rows' columns.
        timed: False to list items in the order of rows, whatever their time and label.
        bad_events: function that returns a mask of a chunk's bad rows, given the kinds of its ids, and its label if the
            rows have one. Bad rows, and rows without a time, are left out. None: the first bad row is an error.

    Raises:
        DataError: ids or times cannot be read.
    """
    user, item, *order = columns = _columns(dataset, timed)
    label = dataset.label if timed else None
    named = None if label is None or label.value is not None else label.source_column
    labelled = named is not None and named in source.column_names()
    read = [*columns, *([named] if labelled and named is not None else [])]
    source.require(read)
    users, items, times = [], [], []
    kinds = [values.id_kind(source.column_type(name), f"{source.uri}, column '{name}'") for name in (user, item)]
    orders = [(name, order_of(source, name)) for name in order]
    for chunk in source.stream(read):
        if bad_events is not None:
            bad = bad_events(chunk, dict(zip((user, item), kinds, strict=True)), label if labelled else None)
            for name, kind_of_times in orders:
                for _, rows in kind_of_times.problems(chunk.column(name)):
                    bad |= rows
            chunk = replace(chunk, rows=chunk.rows[~bad], batch=chunk.batch.filter(pa.array(~bad)))
        of, had = (
            values.as_ids(chunk.column(name), kind, chunk.where(name))
            for name, kind in zip((user, item), kinds, strict=True)
        )
        is_positive = pc.and_(of.is_valid(), had.is_valid())
        if labelled and label is not None:
            is_positive = pc.and_(is_positive, pa.array(labels_of(chunk, label) == 1))
        users.append(of.filter(is_positive))
        items.append(had.filter(is_positive))
        for name, kind_of_times in orders:
            times.append(as_order(chunk, name, kind_of_times)[is_positive.to_numpy(zero_copy_only=False)])
    types = [pa.int64() if kind == "int" else pa.large_string() for kind in kinds]
    encoded_users = pa.concat_arrays([pa.array([], types[0]), *users]).dictionary_encode()
    number = encoded_users.indices.to_numpy(zero_copy_only=False)
    # Stable: equal times stay in the order of rows. Times are not converted: a float64 does not hold every int64.
    by_time = np.lexsort((np.concatenate(times) if times else np.zeros(len(number)), number))
    offsets = np.append(0, np.cumsum(np.bincount(number, minlength=len(encoded_users.dictionary))))
    lists = pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), pa.concat_arrays([pa.array([], types[1]), *items]).take(pa.array(by_time))
    )
    return pa.table({user: encoded_users.dictionary, item: lists})


def _columns(dataset: DatasetSpec, timed: bool) -> list[str]:
    columns = [dataset.features[name].column or name for name in ("user", "item")]
    return [*columns, str(dataset.ordering)] if timed else columns
