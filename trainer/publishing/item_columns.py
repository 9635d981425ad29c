"""Columns of a dataset's item table, which a version with users keeps with its items, for filters."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import keys_of
from trainer.data.columns import values
from trainer.data.sources.source import Source, beside
from trainer.data.sources.types import element_type
from trainer.spec import DatasetSpec, Feature


def item_columns(dataset: DatasetSpec) -> ItemColumns | None:
    """Return the features of the item table that are ids or lists of ids, read from its file; None if there are none.

    Raises:
        DataError: the file cannot be read.
    """
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
    keys: list[pa.Array] = [pa.array([], values_type(kinds[dataset.items.on]))]
    parts: dict[str, list[pa.Array]] = {name: [] for name in chosen}
    for chunk in source.stream(list(dict.fromkeys(names))):
        keys.append(values.as_ids(chunk.column(names[0]), kinds[names[0]], chunk.where(names[0])).cast(keys[0].type))
        for name, feature in chosen.items():
            parts[name].append(_ids(chunk, feature, feature.column or name, kinds[feature.column or name]))
    columns = {name: pa.concat_arrays(part) for name, part in parts.items() if part}
    return ItemColumns(keys_of(pa.concat_arrays(keys)), columns) if columns else None


def values_type(kind: values.Kind) -> pa.DataType:
    return pa.int64() if kind == "int" else pa.large_string()


def _ids(chunk: values.Chunk, feature: Feature, column: str, kind: values.Kind) -> pa.Array:
    """Return a feature's ids in a chunk: int64 or large_string, or large lists of them."""
    if not feature.is_list:
        return values.as_ids(chunk.column(column), kind, chunk.where(column)).cast(values_type(kind))
    elements, lengths = values.as_lists(chunk, column)
    ids = values.as_ids(elements, kind, chunk.where(column)).cast(values_type(kind))
    return pa.LargeListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int64()), ids)
