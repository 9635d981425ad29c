"""Rows for the small form of recipes: the synthetic click log, and users who each have a taste."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.papers.data.click_tasks import write_click_log
from benchmarks.papers.rff.held_out_days import SECONDS_PER_DAY
from trainer.data.sources.click_log import ClickLog
from trainer.generalization.label_randomization import write_table

LOG = ClickLog(num_rows=12_000, num_days=3, seed=0)
"""Two rows in five have a query of their own, so that one-epoch overfitting shows within three epochs."""


def write_quick_data(folder: Path) -> None:
    """Write ``clicklog/`` under ``folder``, unless it exists."""
    write_click_log(folder, LOG)


NUM_TASTES, NUM_TASTE_ITEMS, NUM_TASTE_USERS, TASTE_LENGTH = 5, 250, 500, 24
NUM_TASTE_DAYS = 10
TASTE_CLASSES = {item: f"taste {item % NUM_TASTES}" for item in range(NUM_TASTE_ITEMS)}
"""The class of each item."""


def write_tastes(path: Path) -> None:
    """Write ``user``, ``item``, ``rating``, ``pos``, ``timestamp``, unless ``path`` exists.

    Nine of ten items of a user belong to one class, and the user rates items of this class higher. Each of
    NUM_TASTE_DAYS days from 1970-01-02 on has the same number of users, who take an item a minute.
    """
    if path.exists():
        return
    draw = np.random.Generator(np.random.Philox(0))
    shape = (NUM_TASTE_USERS, TASTE_LENGTH)
    taste = draw.integers(NUM_TASTES, size=(NUM_TASTE_USERS, 1))
    liked = draw.random(shape) < 0.9
    item = draw.integers(NUM_TASTE_ITEMS // NUM_TASTES, size=shape) * NUM_TASTES
    item += np.where(liked, taste, draw.integers(NUM_TASTES, size=shape))
    user = np.broadcast_to(np.arange(NUM_TASTE_USERS)[:, None], shape)
    pos = np.broadcast_to(np.arange(TASTE_LENGTH), shape)
    day = 1 + user * NUM_TASTE_DAYS // NUM_TASTE_USERS
    columns = {"user": user, "item": item, "rating": np.where(liked, 5.0, 2.0), "pos": pos}
    columns["timestamp"] = day * SECONDS_PER_DAY + pos * 60
    write_table(pa.table({name: np.ascontiguousarray(values).ravel() for name, values in columns.items()}), path)
