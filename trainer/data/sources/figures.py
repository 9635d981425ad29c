"""Figures of a dataset: counts and ranges of its rows, labels and features. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.ids import id_column
from trainer.data.columns.labels import RowLabels, RowWeights
from trainer.data.columns.numeric import as_floats
from trainer.data.columns.orders import Order, as_order, order_of
from trainer.data.columns.vectors import Vector, vector_problems, vectors_of
from trainer.data.columns.vocabulary import DistinctIds
from trainer.data.errors import DataError
from trainer.data.sources.source import Chunk, Source
from trainer.spec import DatasetSpec, Label
from trainer.spec.label_tasks import label_tasks
from trainer.spec.losses import LOSSES


def profile(spec: DatasetSpec) -> dict[str, Any]:
    """Return figures of a dataset as a dictionary; reads every row, in a stream.

    The figures are the number of rows, the rate of positive labels (or the range of label values) and the range of the
    ordering column. For each feature there are the numbers of nulls and distinct ids. ``label_problem`` is the error
    that a job would fail with if a label is invalid.
    """
    source = Source(spec.uri, row_filter=spec.filter, ids=spec.id_columns)
    columns_of = {n: f.column or n for n, f in spec.features.items() if f.join is None and f.derive is None}
    numeric = {name: Range() for name in columns_of if spec.features[name].type == "dense"}
    vectors = {one.name: VectorFigures(one) for one in vectors_of(spec) if not one.of_item}
    direct = {
        name: id_column(spec.features[name], column, name)
        for name, column in columns_of.items()
        if spec.features[name].has_ids
    }
    labels = _Labels(spec)
    columns = list(dict.fromkeys([*columns_of.values(), *labels.columns, *filter(None, (spec.ordering,))]))
    source.require(columns)
    distinct = {
        name: DistinctIds(one.kind(source.column_type(one.column), f"{spec.uri}, column '{one.column}'"))
        for name, one in direct.items()
    }
    nulls = dict.fromkeys(direct, 0)
    num_rows = 0
    order = None
    if spec.ordering is not None:
        kind, type_ = order_of(source, spec.ordering), source.column_type(spec.ordering)
        order = _Bounds(kind, type_, spec.max_bad_rows is not None)
    for chunk in source.stream(columns):
        num_rows += len(chunk)
        for name, one in direct.items():
            nulls[name] += int((~values.is_there(chunk.column(one.column))).sum())
            distinct[name].add(one.read(chunk, distinct[name].kind)[0])
        for name, range_ in numeric.items():
            range_.add(chunk.column(columns_of[name]))
        for name, figures in vectors.items():
            figures.add(chunk.column(columns_of[name]))
        labels.add(chunk)
        if order is not None and spec.ordering is not None:
            order.add(chunk, spec.ordering)
    shown = {
        name: {"column": direct[name].column, "nulls": nulls[name], "distinct": len(distinct[name].sorted())}
        for name in direct
    }
    ranges: dict[str, Range | VectorFigures] = {**numeric, **vectors}
    shown |= {name: {"column": columns_of[name], **figures.as_json()} for name, figures in ranges.items()}
    result: dict[str, Any] = {"name": spec.name, "rows": num_rows, "files": len(source.files), "features": shown}
    result["bytes"] = sum(file.path.stat().st_size for file in source.files)
    result |= labels.as_json()
    if order is not None:
        result["order"] = {"column": spec.ordering, **order.as_json()}
    return result


class _Bounds:
    """First and last value of the ordering column; unreadable values are skipped if the dataset allows bad rows."""

    def __init__(self, order: Order, type_: pa.DataType, may_be_bad: bool):
        self._order, self._may_be_bad, self._is_day = order, may_be_bad, pa.types.is_date(type_)
        self._bounds: list[Any] = []

    def add(self, chunk: Chunk, column: str) -> None:
        valid = chunk.column(column).is_valid()
        there = Chunk(chunk.file, chunk.rows[valid.to_numpy(zero_copy_only=False)], chunk.batch.filter(valid))
        numbers, unreadable, other = self._order.read(there.column(column))
        if not self._may_be_bad:
            numbers = as_order(there, column, self._order)
        numbers = numbers[~(unreadable | other)]
        if len(numbers):
            self._bounds += [numbers.min().item(), numbers.max().item()]

    def as_json(self) -> dict[str, Any]:
        if not self._bounds:
            return {"min": None, "max": None}
        bounds: dict[str, Any] = {"min": min(self._bounds), "max": max(self._bounds)}
        if self._order.is_timed:
            length = len("2026-01-31") if self._is_day else None
            bounds = {name: self._order.shown(value)[:length] for name, value in bounds.items()}
        return bounds


class _Labels:
    """Figures of a dataset's label or labels: rate of positives or range of values."""

    def __init__(self, spec: DatasetSpec):
        self._spec, self._problem = spec, ""
        self.columns = tuple(dict.fromkeys(spec.label_columns.values()))
        one = {} if spec.label is None or spec.negatives is not None else {"": spec.label}
        self._labels: dict[str, Label] = {**one, **spec.labels}
        least = {task.name: LOSSES[task.loss].least_label for task in label_tasks(spec)}
        self._least = {name: value for name, value in least.items() if value is not None}
        self._values = {name: Range() for name in self._labels}
        self._positives, self._rows = dict.fromkeys(self._labels, 0), dict.fromkeys(self._labels, 0)

    def add(self, chunk: Chunk) -> None:
        if self._problem or not self._labels:
            return
        try:
            found = RowLabels(self._spec, self._least).read(chunk).astype(np.float64)
            found = found.reshape(len(chunk), len(self._labels))
            if self._spec.weight is not None:
                RowWeights(self._spec.weight).read(chunk)
        except DataError as error:
            self._problem = str(error)
            return
        for name, column in zip(self._labels, found.T, strict=True):
            there = column[~np.isnan(column)]
            self._rows[name] += len(there)
            self._positives[name] += int((there == 1).sum())
            self._values[name].add(pa.array(there))

    def as_json(self) -> dict[str, Any]:
        if self._problem:
            return {"label_problem": self._problem}
        figures = {name: self._figures(name, label) for name, label in self._labels.items()}
        if self._spec.label is not None:
            return figures.get("", {})
        return {"labels": {name: {"rows": self._rows[name], **one} for name, one in figures.items()}}

    def _figures(self, name: str, label: Label) -> dict[str, Any]:
        if label.value is not None:
            return {"label_values": self._values[name].as_json()}
        return {"label_rate": self._positives[name] / self._rows[name] if self._rows[name] else None}


class VectorFigures:
    """Numbers of missing and of bad vectors (other than ``dim`` numbers), and the mean length of the others."""

    def __init__(self, vector: Vector) -> None:
        self._vector = vector
        self.nulls, self.bad, self._there, self._lengths = 0, 0, 0, 0.0

    def add(self, array: pa.Array) -> None:
        found, missing, bad = vector_problems(self._vector, array)
        self.nulls += int(missing.sum())
        self.bad += int(bad.sum())
        self._there += int((~missing & ~bad).sum())
        self._lengths += float(np.linalg.norm(found, axis=1).sum())

    def as_json(self) -> dict[str, Any]:
        mean = self._lengths / self._there if self._there else None
        return {"nulls": self.nulls, "bad": self.bad, "dim": self._vector.dim, "mean_length": mean}


class Range:
    """Smallest and largest value of a numeric column, and the numbers of missing (null, NaN) and of bad values."""

    def __init__(self) -> None:
        self.nulls, self.bad, self.low, self.high = 0, 0, np.inf, -np.inf

    def add(self, array: pa.Array) -> None:
        numbers, bad = as_floats(array)
        present = numbers[~bad & ~np.isnan(numbers)]
        self.bad += int(bad.sum())
        self.nulls += int((np.isnan(numbers) & ~bad).sum())
        if len(present):
            self.low, self.high = min(self.low, float(present.min())), max(self.high, float(present.max()))

    def as_json(self) -> dict[str, Any]:
        known = self.low <= self.high
        return {
            "nulls": self.nulls, "bad": self.bad, "min": self.low if known else None,
            "max": self.high if known else None,
        }  # fmt: skip
