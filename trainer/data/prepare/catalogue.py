"""All items of a dataset with an item table, as a model reads them: the table's items, then others seen in training.

A place is an item's position in this order. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, UNKNOWN_ROW, GrownTable
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import Numeric
from trainer.data.columns.vocabulary import Codes
from trainer.data.prepare.arrays import (
    CODE,
    ITEM_PLACES,
    VALUE,
    JaggedAppender,
    map_array,
    map_jagged,
    open_ids,
    vector_file,
    write_array,
    write_ids,
)
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.plan import DataPlan, FeaturePlan
from trainer.data.prepare.split import SPLIT_NAMES

CATALOGUE = "catalogue"
"""Directory of prepared data, where the dataset has an item table."""
_IDS, _ROWS, _NUMBERS = "ids.arrow", "rows.of.items.bin", "numbers.float32"


@dataclass(frozen=True)
class Catalogue:
    """Items by place.

    Attributes:
        rows: int32 [items], each item's row in its embedding table; the unknown id's row if it has none.
        features: feature of the item table -> table rows [items], or lists of table rows.
        numbers: float32 [items, numeric features of the item table].
        vectors: name -> float32 [items, dim], the vectors of the item table, zeros where it has none.
        num_in_table: number of items of the item table, which come first.
    """

    ids: pa.Array
    rows: npt.NDArray[np.int32]
    features: Mapping[str, npt.NDArray[np.int32] | Jagged]
    numbers: npt.NDArray[np.float32]
    vectors: Mapping[str, npt.NDArray[np.float32]]
    num_in_table: int

    def __len__(self) -> int:
        return len(self.rows)

    def place_of_row(self, num_rows: int) -> npt.NDArray[np.int64]:
        """Return the place in the catalogue of each row of the item table, -1 for the special rows."""
        places = np.full(num_rows, -1, dtype=np.int64)
        places[self.rows] = np.arange(len(self))
        places[:NUM_SPECIAL_ROWS] = -1
        return places

    def is_known(self) -> npt.NDArray[np.bool_]:
        """Mask of the items that training knows, [items]: by their id, by an id of a feature, or by a vector.

        A vector of zeros does not count, because a missing vector is zeros.
        """
        known = np.asarray(self.rows) >= NUM_SPECIAL_ROWS
        for vectors in self.vectors.values():
            known = known | np.asarray(vectors).any(axis=1)
        for column in self.features.values():
            lists = column if isinstance(column, Jagged) else Jagged(column, np.arange(len(self) + 1))
            owners = np.repeat(np.arange(len(self)), lists.lengths)
            known[owners[np.asarray(lists.values) >= NUM_SPECIAL_ROWS]] = True
        return known

    def write(self, directory: Path) -> None:
        directory.mkdir()
        write_ids(directory / _IDS, self.ids)
        write_array(directory / _ROWS, self.rows, CODE)
        write_array(directory / _NUMBERS, self.numbers.reshape(-1), VALUE)
        for name, vectors in self.vectors.items():
            write_array(vector_file(directory, name), vectors.reshape(-1), VALUE)
        for name, column in self.features.items():
            if isinstance(column, Jagged):
                lists = JaggedAppender(directory / name, CODE)
                lists.append(column.values, column.lengths)
                lists.close()
            else:
                write_array(directory / f"{name}.bin", column, CODE)


def open_catalogue(
    directory: Path, is_list: Mapping[str, bool], num_numbers: int, num_in_table: int, dims: Mapping[str, int]
) -> Catalogue:
    """Open the files of :meth:`Catalogue.write`, memory-mapped.

    ``is_list`` is by feature of the item table, ``dims`` by vector of the item table.
    """
    ids = open_ids(directory / _IDS)
    features = {
        name: map_jagged(directory / name, CODE) if lists else map_array(directory / f"{name}.bin", CODE)
        for name, lists in is_list.items()
    }
    numbers = map_array(directory / _NUMBERS, VALUE).reshape(len(ids), num_numbers)
    vectors = {name: map_array(vector_file(directory, name), VALUE).reshape(-1, dim) for name, dim in dims.items()}
    return Catalogue(ids, map_array(directory / _ROWS, CODE), features, numbers, vectors, num_in_table)


def catalogue_of(
    plan: DataPlan, encoded: Encoded, grown: Mapping[str, GrownTable], numeric: Sequence[Numeric]
) -> Catalogue:
    """Return all items as the model reads them.

    ``numeric`` are the numeric features with their statistics; features of the item table come last.
    """
    items, item = plan.items, plan.single("item")
    assert items is not None
    table = grown[item.domain].ids.ids
    ids = values.as_ids(items.ids, plan.kinds[item.domain], f"{items.source.uri}, column of ids")
    found = Codes(table).encode(ids)
    rows = np.where(found >= 0, found + NUM_SPECIAL_ROWS, UNKNOWN_ROW)
    is_other = np.ones(len(table), dtype=bool)
    is_other[found[found >= 0]] = False
    others = np.flatnonzero(is_other)
    features = {
        feature.name: _rows_of(plan, encoded, grown[feature.table], feature, len(others))
        for feature in plan.features
        if plan.dataset.items is not None and feature.name in plan.dataset.items.features
    }
    positions = np.append(np.arange(len(items)), np.full(len(others), -1))
    columns = [one.apply(items.values_at(positions, one.name)) for one in numeric[len(plan.numeric) :]]
    return Catalogue(
        pa.concat_arrays([ids, table.take(pa.array(others))]),
        np.append(rows, others + NUM_SPECIAL_ROWS).astype(np.int32),
        features,
        np.stack(columns, axis=1) if columns else np.empty((len(positions), 0), dtype=VALUE),
        {one.name: items.values_at(positions, one.name) for one in plan.vectors if one.of_item},
        len(items),
    )


def _rows_of(
    plan: DataPlan, encoded: Encoded, grown: GrownTable, feature: FeaturePlan, num_others: int
) -> npt.NDArray[np.int32] | Jagged:
    """Return a feature's table rows for all items; items outside the item table get the unknown id's row."""
    codes = plan.joins[feature.name].coded(encoded.codes[feature.table], plan.kinds[feature.table])
    if isinstance(codes, Jagged):
        offsets = np.append(codes.offsets, np.full(num_others, codes.offsets[-1]))
        return Jagged(grown.row_of_code[codes.values], offsets)
    # The last entry of ``codes`` belongs to a missing item.
    return grown.row_of_code[np.append(codes[:-1], np.repeat(codes[-1:], num_others))]


def write_catalogue(catalogue: Catalogue, directory: Path, log: Callable[[str], Any]) -> None:
    """Write the catalogue beside the splits, and into each split the position of every example's item in it."""
    catalogue.write(directory / CATALOGUE)
    places_of_rows = catalogue.place_of_row(int(catalogue.rows.max()) + 1).astype(CODE)
    absent = count = 0
    for name in SPLIT_NAMES:
        places = map_array(directory / name / ITEM_PLACES, CODE, mode="r+")
        lacking = np.flatnonzero(places < 0)
        places[lacking] = places_of_rows[map_array(directory / name / "item.bin", CODE)[lacking]]
        absent, count = absent + len(lacking), count + len(places)
    untrained = int((catalogue.rows[: catalogue.num_in_table] < NUM_SPECIAL_ROWS).sum())
    log(
        f"item table: {catalogue.num_in_table:,} items, {untrained:,} of them not trained on; "
        f"{absent / max(count, 1):.2%} of the examples have items that are not in the table: their features are unknown"
    )
