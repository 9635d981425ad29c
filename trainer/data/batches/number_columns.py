"""Gathering of the numeric features and vectors of a split's examples, for batches. Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.columns.vectors import arranged
from trainer.data.prepare.catalogue import Catalogue

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


def number_columns(data: PreparedColumns, split: str) -> Float32s | VectorColumns | None:
    """Return the numbers and vectors of a split's examples, arranged as in :mod:`trainer.data.columns.vectors`.

    None if the data have neither.
    """
    if data.vectors:
        return VectorColumns(data, split)
    return data.numbers(split) if data.num_dense else None


class VectorColumns:
    """Numbers and vectors of examples; the items' vectors are looked up in the catalogue by the example's item.

    Prepared data hold the items' vectors once, in the catalogue, and not for each example.
    """

    def __init__(self, data: PreparedColumns, split: str):
        self._vectors, self._num_of_rows = data.vectors, data.num_dense - data.num_item_numbers
        self._numbers = data.numbers(split).view(np.ndarray) if data.num_dense else None
        self._columns = {one.name: data.row_vectors(split, one) for one in data.vectors if not one.of_item}
        self._items: Catalogue | None = None
        if any(one.of_item for one in data.vectors):
            self._items, self._places = data.catalogue, data.item_places(split)

    def __getitem__(self, rows: Int64s) -> Float32s:
        none = np.empty((len(rows), 0), dtype=np.float32)
        numbers = none if self._numbers is None else self._numbers[rows]
        blocks = {name: np.asarray(column[rows]) for name, column in self._columns.items()}
        if self._items is not None:
            blocks |= item_vectors(self._items, np.asarray(self._places[rows]))
        return arranged(numbers[:, : self._num_of_rows], numbers[:, self._num_of_rows :], self._vectors, blocks)


def item_vectors(catalogue: Catalogue, places: npt.NDArray[np.integer]) -> dict[str, Float32s]:
    """Return the vectors of the items at these catalogue positions [b], name -> [b, dim]; zeros at position -1."""
    found = {}
    for name, vectors in catalogue.vectors.items():
        found[name] = np.array(vectors[places])
        found[name][places < 0] = 0.0
    return found


def item_numbers(data: PreparedColumns, places: npt.NDArray[np.integer]) -> Float32s | None:
    """Return the numbers and vectors of the items at these positions, float32 [b, n], as an item tower reads them.

    None if items have neither.
    """
    catalogue = data.catalogue
    assert catalogue is not None
    if not (catalogue.numbers.shape[1] or catalogue.vectors):
        return None
    of_items = [one for one in data.vectors if one.of_item]
    none = np.empty((len(places), 0), dtype=np.float32)
    return arranged(none, catalogue.numbers[places], of_items, item_vectors(catalogue, places))
