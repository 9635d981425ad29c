"""A small click log whose clicks follow the genre of an item, with an item table that has items nobody clicked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

NUM_USERS, NUM_CLICKED, NUM_ITEMS = 40, 60, 80
NUM_ABSENT = 5
"""Items 0 to NUM_ABSENT - 1 are clicked and not in the table, from NUM_CLICKED on they are in the table alone."""
RANKING = ["auc", "recall_20_full", "ndcg_10_full"]


def genre_of(item: np.ndarray | int) -> Any:
    return item % 4


def write_log(folder: Path, *, num_rows: int = 3000, seed: int = 0, last: int = NUM_CLICKED) -> Path:
    """user, item, click, part: a user clicks the items of the user's own genre, most of the time."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, NUM_USERS, num_rows), rng.integers(0, last, num_rows)
    click = rng.random(num_rows) < np.where(genre_of(item) == user % 4, 0.9, 0.1)
    part = rng.choice(["train", "validation", "test"], num_rows, p=[0.8, 0.1, 0.1])
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"user": user, "item": item, "click": click.astype(np.int64), "part": part}), path)
    users = pa.table({"user": np.arange(NUM_USERS), "taste": np.arange(NUM_USERS) % 4})
    pq.write_table(users, folder / "users.parquet")
    return path


def items_table(seed: int = 0) -> pa.Table:
    """item, genres (text, the genre first), brand (null for some), price (null for some); in no order."""
    items = np.random.default_rng(seed).permutation(np.arange(NUM_ABSENT, NUM_ITEMS))
    genres = [f"g{genre_of(item)}|h{item % 3}" if item % 10 else None for item in items]
    brand = pa.array(items % 7, mask=items % 9 == 0)
    price = pa.array(items * 1.5 + 1.0, mask=items % 11 == 0)
    return pa.table({"item": items, "genres": genres, "brand": brand, "price": price})


def dataset_at(path: Path, items: dict[str, Any] | None = None, **changes: Any) -> DatasetSpec:
    features = {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "taste": {"type": "id", "join": {"uri": "users.parquet", "on": "user", "column": "taste"}},
    }
    of_items = {
        "genres": {"type": "id_list", "pooling": "sum"},
        "brand": {"type": "id"},
        "price": {"type": "dense", "transform": "standardize"},
    }
    document = {
        "name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"},
        "items": {"uri": "items.parquet", "features": of_items, **(items or {})},
    }  # fmt: skip
    return parse_dataset(document | changes)


def job_of(model: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    document = {
        "name": "items", "dataset": {"name": "clicks"},
        "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8], **(model or {})},
        "optimizer": {"kind": "adam", "learning_rate": 0.02}, "dense_optimizer": {"learning_rate": 0.02},
        "epochs": 2, "batch_size": 128, "evaluation": {"split": {"kind": "column", "column": "part"}},
    }  # fmt: skip
    return parse_job(document | changes)


def prepared_log(folder: Path, **rows: Any) -> Path:
    """Write the rows, the users' file and the item table; return the rows' path."""
    path = write_log(folder, **rows)
    pq.write_table(items_table(), folder / "items.parquet")
    return path
