"""Columns of items, such as a brand: recommendations are filtered by them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embeddings.vectors.item_vectors import Array, find_rows


@dataclass(frozen=True, eq=False)
class ItemColumns:
    """Columns with a row for each of ``keys`` (embeddings.vectors.item_vectors.keys_of), in any order.

    A column holds int64 or large_string ids, or large lists of them; null where an item has no value.
    """

    keys: Array
    columns: Mapping[str, pa.Array]

    def aligned(self, keys: Array) -> ItemColumns:
        """Return the columns with a row for each of ``keys``, null for those that are not here."""
        if keys is self.keys:
            return self
        order = np.argsort(self.keys, kind="stable")
        rows = find_rows(self.keys[order], keys)
        is_absent = rows < 0
        taken = pa.array(order[np.where(is_absent, 0, rows)] if len(order) else rows, mask=is_absent)
        return ItemColumns(keys, {name: column.take(taken) for name, column in self.columns.items()})

    def described(self) -> dict[str, Any]:
        """Return {name: {ids: int64 or string, list}}."""
        found = {}
        for name, column in self.columns.items():
            is_list = pa.types.is_large_list(column.type)
            ids = column.type.value_type if is_list else column.type
            found[name] = {"ids": "int64" if pa.types.is_int64(ids) else "string", "list": is_list}
        return found

    def matching(self, name: str, wanted: list[Any]) -> Array:
        """Return a mask of the items with one of the values ``wanted`` in a column, or in the column's list."""
        column = self.columns[name]
        if not pa.types.is_large_list(column.type):
            return _among(column, wanted)
        found = _among(column.flatten(), wanted)
        owners = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        return np.bincount(owners[found], minlength=len(column)) > 0


def _among(ids: pa.Array, wanted: list[Any]) -> Array:
    return pc.is_in(ids, value_set=pa.array(wanted, ids.type)).to_numpy(zero_copy_only=False)
