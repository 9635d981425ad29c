"""Copies of a dataset's rows with other labels: permuted, drawn by fair coins, or changed in a few rows.

Permuted labels: Zhang et al. 2016; Mądry's lecture, section 5. Fair coins: section 3 of the lecture.

A copy is an ordinary data file. The same job on it has the same rows in the same order, the same split and the same
random draws, and differs only in the labels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing
from trainer.data.errors import DataError
from trainer.spec import parse_dataset
from trainer.spec.dataset import DatasetSpec, parse_rule

_COMPARE = {
    ">=": np.greater_equal, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal, ">": np.greater, "<": np.less,
}  # fmt: skip


def label_column(dataset: DatasetSpec) -> str:
    """Return the column from which labels are computed.

    Raises:
        ValueError: there is no such column because negatives are drawn, or there are several labels.
    """
    if dataset.label is None:
        raise ValueError(f"dataset '{dataset.name}' has several labels: name one of them as label, in a copy of it")
    column = dataset.label.source_column
    if column is None:
        raise ValueError(
            f"dataset '{dataset.name}': its label is not a column that can be permuted: write positives and "
            "negatives as rows with a label column"
        )
    return column


def permuted(dataset: DatasetSpec, path: Path) -> None:
    """Write the rows with their label column in random order, unless ``path`` exists."""
    draw = np.random.Generator(np.random.Philox(0))
    write_labels(dataset, path, lambda column: column.take(draw.permutation(len(column))))


def coins(dataset: DatasetSpec, path: Path) -> None:
    """Write the rows with labels of two classes drawn by fair coins, unless ``path`` exists.

    The label is copied from a random row of the drawn class.

    Raises:
        ValueError: all rows have the same class.
    """
    draw = np.random.Generator(np.random.Philox(0))

    def drawn(column: pa.ChunkedArray) -> pa.Array:
        values = column.to_numpy()
        labels = _labels(dataset, values)
        heads = draw.random(len(values)) < 0.5
        others = values.copy()
        for side, class_of in ((heads, labels > 0), (~heads, labels <= 0)):
            rows = _some(np.flatnonzero(class_of), dataset)
            others[side] = values[rows[draw.integers(len(rows), size=int(side.sum()))]]
        return pa.array(others, column.type)

    write_labels(dataset, path, drawn)


def changed(dataset: DatasetSpec, path: Path, count: int) -> None:
    """Write the rows with other labels in ``count`` of them, chosen at random, unless ``path`` exists.

    A changed label is copied from a random row whose label differs (by the label's rule, if it has one).

    Raises:
        ValueError: every row has the same label.
    """
    draw = np.random.Generator(np.random.Philox(0))

    def relabelled(column: pa.ChunkedArray) -> pa.Array:
        values = column.to_numpy()
        labels = _labels(dataset, values)
        others = values.copy()
        for row in draw.choice(len(values), size=min(count, len(values)), replace=False).tolist():
            rows = _some(np.flatnonzero(labels != labels[row]), dataset)
            others[row] = values[rows[int(draw.integers(len(rows)))]]
        return pa.array(others, column.type)

    write_labels(dataset, path, relabelled)


def at(dataset: DatasetSpec, path: Path) -> DatasetSpec:
    """Return the dataset with its rows in ``path``; joined files and graphs are still read from their old location."""
    document = dataset.model_dump(mode="json", exclude_unset=True)
    home = Path(dataset.uri.removeprefix("file://")).parent
    for part in [one.get("join") for one in document["features"].values()] + list(document.get("graphs", {}).values()):
        if part is not None and "/" not in part["uri"]:
            part["uri"] = str(home / part["uri"])
    return parse_dataset(document | {"uri": str(path)}, dataset.name)


def _some(rows: npt.NDArray[np.intp], dataset: DatasetSpec) -> npt.NDArray[np.intp]:
    if not len(rows):
        raise ValueError(
            f"dataset '{dataset.name}': every row has the same label: there is no other label to give to rows"
        )
    return rows


def _labels(dataset: DatasetSpec, values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    if dataset.label is None or dataset.label.rule is None:
        return values.astype(np.float64)
    _, comparison, number = parse_rule(dataset.label.rule)
    labels: npt.NDArray[np.float64] = _COMPARE[comparison](values, number).astype(np.float64)
    return labels


def read_rows(dataset: DatasetSpec) -> pa.Table:
    """Return the rows of a Parquet dataset, with dictionary-encoded columns decoded.

    Raises:
        DataError: there is no such file, or it has another format.
    """
    path = Path(dataset.uri.removeprefix("file://"))
    if not path.exists():
        raise DataError("no such file or directory", where=str(path), remedy="give the folder of the data with --data")
    if path.is_file() and path.suffix not in (".parquet", ".pq"):
        raise DataError("is not Parquet", where=str(path), remedy="write it as Parquet to have its labels permuted")
    table = pq.read_table(path)
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table[field.name].cast(field.type.value_type))
    return table


def write_labels(dataset: DatasetSpec, path: Path, relabel: Callable[[pa.ChunkedArray], Any]) -> None:
    """Write the rows with another label column, unless ``path`` exists."""
    if not path.exists():
        table, name = read_rows(dataset), label_column(dataset)
        labels = relabel(table[name])
        write_table(table.set_column(table.column_names.index(name), name, labels), path, compression="zstd")


def write_table(table: pa.Table, path: Path, **options: Any) -> None:
    """Write a table; ``options`` are those of :func:`pyarrow.parquet.write_table`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path, durable=False) as temporary:
        pq.write_table(table, temporary, **options)
