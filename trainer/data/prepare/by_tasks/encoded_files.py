"""Encoded rows as files of a folder, which another host opens. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.jagged import Jagged
from trainer.data.columns.labels import label_dtype
from trainer.data.columns.vocabulary import Codes
from trainer.data.prepare.arrays import CODE, LABEL, OFFSET, VALUE, map_array
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.plan import DataPlan
from trainer.storage.shared_directory import link_or_copy


def ids_file(folder: Path, domain: int) -> Path:
    """Return the file of the distinct ids of a domain, by its number among ``plan.kinds``."""
    return folder / f"ids-{domain}.arrow"


def order_file(folder: Path, column: int) -> Path:
    """Return the file of an order of rows, by its number among ``plan.order_columns``."""
    return folder / f"order-{column}.bin"


def write_ids(path: Path, ids: pa.Array) -> None:
    batch = pa.record_batch([ids], names=["id"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def open_ids(path: Path) -> pa.Array:
    """Open the ids of :func:`write_ids`, memory-mapped."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0).column(0)


def write_encoded(plan: DataPlan, encoded: Encoded, folder: Path) -> dict[str, str]:
    """Write the files of :func:`open_encoded`, memory-mapped ones as links; return the types of orders by column."""
    for number, domain in enumerate(plan.kinds):
        write_ids(ids_file(folder, number), encoded.codes[domain].ids)
    for name, array in _arrays(plan, encoded):
        if isinstance(array, np.memmap) and array.filename is not None and array.offset == 0:
            link_or_copy(Path(array.filename), folder / name)
        else:
            array.tofile(folder / name)
    return {column: array.dtype.str for column, array in encoded.orders.items()}


def open_encoded(plan: DataPlan, folder: Path, num_rows: int, orders: dict[str, str]) -> Encoded:
    """Return encoded rows, memory-mapped.

    Args:
        plan: of the rows.
        folder: of :func:`write_encoded`.
        num_rows: how many there are.
        orders: what :func:`write_encoded` returned.
    """
    columns: dict[Any, Any] = {}
    for number, use in enumerate(plan.uses):
        if use.is_list:
            values = map_array(folder / f"column-{number}.values", CODE)
            columns[use] = Jagged(values, map_array(folder / f"column-{number}.offsets", OFFSET))
        else:
            columns[use] = map_array(folder / f"column-{number}", CODE)
    labels: npt.NDArray[Any] | None = None
    if plan.dataset.negatives is None:
        labels = map_array(folder / "labels", label_dtype(plan.dataset))
        labels = labels.reshape(-1, len(plan.tasks)) if plan.tasks else labels
    return Encoded(
        num_rows,
        {domain: Codes(open_ids(ids_file(folder, number))) for number, domain in enumerate(plan.kinds)},
        columns,
        {name: map_array(folder / f"joined-{number}", CODE) for number, name in enumerate(plan.joins)},
        labels,
        map_array(folder / "row-weights", VALUE) if plan.dataset.weight is not None else None,
        {name: map_array(order_file(folder, plan.order_columns.index(name)), dtype) for name, dtype in orders.items()},
        map_array(folder / "sides", LABEL) if plan.job.evaluation.split.column is not None else None,
        {
            use: map_array(folder / f"weights-{number}", VALUE)
            for number, use in enumerate(plan.uses)
            if use.weights is not None
        },
        tuple(map_array(folder / f"numeric-{number}", np.float64) for number in range(len(plan.numeric))),
        {
            one.name: map_array(folder / f"vector-{number}", VALUE).reshape(-1, one.dim)
            for number, one in enumerate(plan.row_vectors)
        },
    )


def _arrays(plan: DataPlan, encoded: Encoded) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for number, use in enumerate(plan.uses):
        column = encoded.columns[use]
        if isinstance(column, Jagged):
            yield f"column-{number}.values", column.values
            yield f"column-{number}.offsets", column.offsets
        else:
            yield f"column-{number}", column
        if use in encoded.weights:
            yield f"weights-{number}", encoded.weights[use]
    for number, name in enumerate(plan.joins):
        yield f"joined-{number}", encoded.joined[name]
    for name, order in encoded.orders.items():
        yield order_file(Path(), plan.order_columns.index(name)).name, order
    for number, numbers in enumerate(encoded.numeric):
        yield f"numeric-{number}", numbers
    for number, one in enumerate(plan.row_vectors):
        yield f"vector-{number}", encoded.vectors[one.name]
    others = {"labels": encoded.labels, "row-weights": encoded.row_weights, "sides": encoded.sides}
    for name, array in others.items():
        if array is not None:
            yield name, array
