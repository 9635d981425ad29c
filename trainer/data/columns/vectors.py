"""Vectors as features: fixed numbers of floats from columns of lists, and their positions in a batch. Torch-free.

A null value is a missing vector, which is read as zeros. A list is bad if it has another length, or contains null, NaN,
an infinite number or one beyond float32; it is reported like other bad values.

A batch has one float32 block of numbers, [b, n]. In this order, it holds the numeric features of the rows, their
unprojected vectors, the numeric features and unprojected vectors of the item table, and the projected vectors of the
rows, then of the item table. Models read all but the projected vectors as numbers, and project the rest
(:class:`trainer.models.base.VectorFields`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns import values
from trainer.data.columns.base import Column, Mask, Problem
from trainer.data.columns.numeric import as_floats
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import VALUE, vector_file
from trainer.data.sources.source import Chunk
from trainer.spec import DatasetSpec, Feature

VECTORS_FILE = "vectors.json"
"""Name of the file that describes the vectors, in prepared data and in checkpoints."""

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Vector(Column):
    """A feature whose values are vectors of ``dim`` numbers in a column.

    With ``normalize`` they are scaled to length 1. With ``projected`` a model reads a learned projection of a vector,
    not its numbers. With ``required`` a missing vector is a bad value. ``of_item`` marks features of the item table.
    """

    name: str
    column: str
    dim: int
    normalize: bool = False
    projected: bool = True
    required: bool = False
    of_item: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dim,)

    @property
    def split_file(self) -> str:
        return vector_file(Path(), self.name).name

    def read(self, chunk: Chunk) -> Float32s:
        """Return the vectors as a model reads them, float32 [rows, dim]; a missing vector is zeros."""
        column = chunk.column(self.column)
        found, missing, bad = vector_problems(self, column)
        if self.required:
            bad = bad | missing
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise DataError(
                f"feature '{self.name}' is {_shown(column[row].as_py())}: "
                + ("missing" if missing[row] else f"no vector of {self.dim} finite numbers"),
                where=chunk.where(self.column, row),
                remedy="correct it, remove the row, or set max_bad_rows of the dataset, or missing or dim of the "
                "feature",
            )
        return scaled(self, found)

    def problems(self, chunk: Chunk) -> Iterator[Problem]:
        _, missing, bad = vector_problems(self, chunk.column(self.column))
        yield self.column, f"no vector of {self.dim} finite numbers", bad
        if self.required:
            yield self.column, "missing", missing


def vectors_of(dataset: DatasetSpec) -> tuple[Vector, ...]:
    """Return the vectors of the rows, then those of the item table."""
    of_items = {} if dataset.items is None else dataset.items.features
    return _planned(dataset.features, False) + _planned(of_items, True)


def _planned(features: Mapping[str, Feature], of_item: bool) -> tuple[Vector, ...]:
    return tuple(
        Vector(
            name, feature.column or name, feature.dim or 0, feature.transform == "normalize",
            feature.mode == "projected", feature.missing == "error", of_item,
        )
        for name, feature in features.items()
        if feature.type == "vector"
    )  # fmt: skip


def given_columns(vectors: Sequence[Vector], of_item: bool | None = None) -> int:
    """Count the columns of unprojected vectors: of the rows (False), of the item table (True), of both (None)."""
    return sum(one.dim for one in vectors if not one.projected and of_item in (None, one.of_item))


def arranged(
    of_rows: Float32s, of_items: Float32s, vectors: Sequence[Vector], blocks: Mapping[str, Float32s]
) -> Float32s:
    """Return the block of numbers of a batch [b, n] from its parts, each [b, ...]; ``blocks``: name -> vectors."""
    given = [one for one in vectors if not one.projected]
    rows = [blocks[one.name] for one in given if not one.of_item]
    items = [blocks[one.name] for one in given if one.of_item]
    projected = [blocks[one.name] for one in vectors if one.projected]
    return np.concatenate([of_rows, *rows, of_items, *items, *projected], axis=1, dtype=VALUE)


def columns_of(of_rows: Sequence[str], of_items: Sequence[str], vectors: Sequence[Vector]) -> dict[str, slice]:
    """Return the columns of numbers and vectors in a batch (:func:`arranged`), by feature."""
    given = [one for one in vectors if not one.projected]
    widths = [
        *((name, 1) for name in of_rows),
        *((one.name, one.dim) for one in given if not one.of_item),
        *((name, 1) for name in of_items),
        *((one.name, one.dim) for one in given if one.of_item),
        *((one.name, one.dim) for one in vectors if one.projected),
    ]
    ends = np.cumsum([width for _, width in widths], dtype=int).tolist()
    return {name: slice(end - width, end) for (name, width), end in zip(widths, ends, strict=True)}


def write_vectors(vectors: Sequence[Vector], path: Path) -> None:
    path.write_text(json.dumps([asdict(one) for one in vectors], indent=1), "utf-8")


def open_vectors(path: Path) -> tuple[Vector, ...]:
    """Return the vectors in a file that :func:`write_vectors` wrote."""
    return vectors_from(json.loads(path.read_text("utf-8")))


def vectors_from(documents: Sequence[Mapping[str, Any]]) -> tuple[Vector, ...]:
    return tuple(Vector(**one) for one in documents)


def require_lists(type_: pa.DataType, vector: Vector, where: str) -> None:
    """Check that a column can hold these vectors.

    Raises:
        DataError: it holds something else, or lists that are all of another length.
    """
    if pa.types.is_null(type_):
        return
    if not values.is_list(type_) and not values.is_text(type_):
        remedy = "write lists of numbers of one length, or use another type for the feature"
        raise DataError(f"holds {type_}, and a vector is a list of numbers", where=where, remedy=remedy)
    if pa.types.is_fixed_size_list(type_) and type_.list_size != vector.dim:
        raise DataError(
            f"holds vectors of {type_.list_size} numbers, and feature '{vector.name}' has dim: {vector.dim}",
            where=where,
            remedy=f"set dim: {type_.list_size}, or name another column",
        )


def vector_problems(vector: Vector, array: pa.Array) -> tuple[Float32s, Mask, Mask]:
    """Return vectors, float32 [rows, dim], zeros where missing or bad; and masks of missing and of bad vectors."""
    count = len(array)
    found = np.zeros((count, vector.dim), dtype=VALUE)
    if pa.types.is_null(array.type):
        return found, np.ones(count, dtype=bool), np.zeros(count, dtype=bool)
    if values.is_text(array.type):
        array = pc.if_else(pc.equal(array, ""), None, array)
    elif not values.is_list(array.type):
        return found, np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
    missing = ~array.is_valid().to_numpy(zero_copy_only=False)
    elements, of, _ = values.raw_lists(array)
    numbers, wrong = as_floats(elements)
    bad = ~missing & (np.bincount(of, minlength=count) != vector.dim)
    bad[of[wrong | np.isnan(numbers)]] = True
    bad &= ~missing
    there = ~missing & ~bad
    found[there] = numbers[there[of]].reshape(-1, vector.dim)
    return found, missing, bad


def scaled(vector: Vector, found: Float32s) -> Float32s:
    """Return the vectors [rows, dim], each divided by its length if ``vector.normalize``; zeros stay zeros."""
    if not vector.normalize:
        return found
    lengths = np.linalg.norm(found.astype(np.float64), axis=1, keepdims=True)
    return (found / np.where(lengths > 0, lengths, 1.0)).astype(VALUE)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:60])
    if not isinstance(value, list) or len(value) <= 4:
        return repr(value)
    return f"[{', '.join(map(repr, value[:3]))}, ...] of {len(value)}"
