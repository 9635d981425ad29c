"""The click log of tests.trainer.item_tables with vectors: of each row a mood, of most items what they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.trainer.item_tables import NUM_ABSENT, NUM_ITEMS, genre_of, job_of, write_log
from trainer.spec import DatasetSpec, JobSpec, parse_dataset

DIM_ABOUT, DIM_MOOD = 5, 3
MODEL = {"loss": "sampled_softmax", "normalize": True, "temperature": 0.3}


def about_of(item: int) -> list[float] | None:
    """A direction for each genre, with something of its own; None for one item in thirteen."""
    if item % 13 == 0:
        return None
    own = np.random.default_rng(item).normal(0, 0.2, DIM_ABOUT)
    own[genre_of(item)] += 2.0
    return own.astype(np.float32).tolist()


def write_vectors(folder: Path, seed: int = 0, scale: float = 1.0) -> Path:
    """Write rows with ``mood`` (and its numbers ``mood_0`` ...) and ``age``, and items with ``about`` and ``price``."""
    path = write_log(folder, num_rows=1200, seed=seed)
    rows = pq.read_table(path)
    mood = (scale * np.random.default_rng(seed + 9).normal(0.3, 1, (len(rows), DIM_MOOD))).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(mood.reshape(-1)), DIM_MOOD)
    rows = rows.append_column("mood", lists).append_column("age", pa.array(np.arange(len(rows)) % 50 / 50.0))
    for column in range(DIM_MOOD):
        rows = rows.append_column(f"mood_{column}", pa.array(mood[:, column].astype(np.float64)))
    pq.write_table(rows, path)
    items = np.random.default_rng(3).permutation(np.arange(NUM_ABSENT, NUM_ITEMS))
    about = pa.array([about_of(int(item)) for item in items], pa.list_(pa.float32()))
    pq.write_table(pa.table({"item": items, "about": about, "price": items * 0.01}), folder / "items.parquet")
    return path


def dataset_at(
    path: Path, of_rows: dict[str, Any] | None = None, of_items: Any = "about", **changes: Any
) -> DatasetSpec:
    """``of_rows``: features beside user and item; ``of_items``: those of the item table, None for no item table."""
    mood = {"mood": {"type": "vector", "dim": DIM_MOOD}, "age": {"type": "dense"}}
    features = {"user": {"type": "id"}, "item": {"type": "id"}, **(mood if of_rows is None else of_rows)}
    document = {"name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"}}
    if of_items == "about":
        about = {"type": "vector", "dim": DIM_ABOUT, "transform": "normalize"}
        of_items = {"about": about, "price": {"type": "dense"}}
    if of_items is not None:
        document["items"] = {"uri": "items.parquet", "features": of_items}
    return parse_dataset(document | changes)


def vector_job(model: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    return job_of(MODEL if model is None else model, **changes)
