"""A share of the training rows of a random split, with all its validation and test rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.data.columns.hashing import combine, id_keys
from trainer.data.prepare.split import TRAIN, random_split
from trainer.generalization.label_randomization import read_rows, write_table
from trainer.spec import DatasetSpec, Split


def write_training_share(dataset: DatasetSpec, split: Split, path: Path, share: float, seed: int = 0) -> None:
    """Write held-out rows and a random ``share`` of the training rows, unless ``path`` exists.

    A random split hashes a row's user and item, so a job with the same split holds out the same rows of the file.

    Args:
        dataset: Parquet with the integer columns ``user`` and ``item``.
        split: of kind ``random``.
        path: path of the Parquet file.
        share: share of the training rows that stay, in (0, 1].
        seed: seed of the draw.
    """
    if path.exists():
        return
    table = read_rows(dataset)
    keys = [id_keys(table[name].cast(pa.int64()).combine_chunks()) for name in ("user", "item")]
    trains = random_split(split, combine(*keys)) == TRAIN
    kept = np.random.Generator(np.random.Philox(seed)).random(len(table)) < share
    write_table(table.filter(pa.array(~trains | kept)), path, compression="zstd")
