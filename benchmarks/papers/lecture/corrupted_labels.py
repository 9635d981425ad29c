"""A random part of a dataset, and a copy of it with labels permuted among a share of its training rows (figure 1)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.generalization.label_randomization import read_rows, write_labels, write_table
from trainer.spec import DatasetSpec


def part(dataset: DatasetSpec, path: Path, num_rows: int, seed: int = 0) -> None:
    """Write ``num_rows`` random rows, a random tenth of them with ``is_test`` true, unless ``path`` exists."""
    if not path.exists():
        draw = np.random.Generator(np.random.Philox(seed))
        table = read_rows(dataset)
        chosen = table.take(draw.permutation(len(table))[:num_rows])
        write_table(chosen.append_column("is_test", pa.array(draw.random(len(chosen)) < 0.1)), path, compression="zstd")


def corrupted(dataset: DatasetSpec, path: Path, share: float, seed: int = 0) -> None:
    """Write the rows with labels permuted among a random share of the rows that are not test rows.

    Does nothing if ``path`` exists. Figure 1 of the lecture, after Zhang et al. 2016; ``dataset`` has a column
    ``is_test`` (:func:`part`).
    """
    draw = np.random.Generator(np.random.Philox(seed))

    def relabelled(column: pa.ChunkedArray) -> pa.Array:
        trains = np.flatnonzero(~read_rows(dataset)["is_test"].to_numpy())
        rows = draw.permutation(trains)[: round(share * len(trains))]
        values = column.to_numpy().copy()
        values[rows] = values[draw.permutation(rows)]
        return pa.array(values, column.type)

    write_labels(dataset, path, relabelled)
