"""The item table of a dataset: ids of all items, with their numbers and vectors. Torch-free; held in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.numeric import Numeric
from trainer.data.columns.vectors import Vector, require_lists
from trainer.data.errors import DataError
from trainer.data.sources.join import JoinTable
from trainer.data.sources.source import Source, beside
from trainer.spec import DatasetSpec, ItemTable, Join

ITEM_TABLE = "item table"
"""Name of the item table among the joins of a plan; no feature can have this name."""


class ItemFile:
    """The ids of an item table, by position in its file, its numbers and its vectors.

    ``uri``: location of the file; ``numeric`` and ``vectors`` are the features of the item table.

    Raises:
        DataError: a column is missing, an id is null or repeated, or a value is not of its feature's type.
    """

    def __init__(self, items: ItemTable, uri: str, numeric: Sequence[Numeric], vectors: Sequence[Vector] = ()):
        self.lookup = JoinTable(Join(uri=items.uri, on=items.on, column=items.on), uri)
        source = self.lookup.source
        for name, feature in items.features.items():
            column = feature.column or name
            source.require([column])
            if feature.type == "id" and values.is_list(source.column_type(column)):
                where = f"{uri}, column '{column}'"
                raise DataError("holds lists", where=where, remedy=f"set type: id_list of items.features.{name}")
        for vector in vectors:
            require_lists(source.column_type(vector.column), vector, f"{uri}, column '{vector.column}'")
        read: tuple[Numeric | Vector, ...] = (*numeric, *vectors)
        columns = list(dict.fromkeys(one.column for one in read))
        parts = {one.name: [np.empty((0, *one.shape), dtype=one.dtype)] for one in read}
        for chunk in source.stream(columns) if columns else ():
            for one in read:
                parts[one.name].append(one.read(chunk))
        self._values = {name: np.concatenate(part) for name, part in parts.items()}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ids(self) -> pa.Array:
        """The raw ids, in the order of the file."""
        return self.lookup.keys

    @property
    def source(self) -> Source:
        return self.lookup.source

    def values_at(self, positions: npt.NDArray[np.integer], name: str) -> npt.NDArray[Any]:
        """Return numbers or vectors at positions of the file, [n, ...]; NaN or zeros if missing, or for position -1."""
        found = self._values[name][positions]
        found[positions < 0] = np.nan if found.ndim == 1 else 0.0
        return found


def item_file(
    dataset: DatasetSpec, numeric: Sequence[Numeric], vectors: Sequence[Vector] = (), uri: str | None = None
) -> ItemFile | None:
    """Return the item table of a dataset, if any; ``uri``: the file that stands in for the dataset's."""
    items = dataset.items
    return None if items is None else ItemFile(items, uri or beside(items.uri, dataset.uri), numeric, vectors)
