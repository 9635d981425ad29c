"""Days of a log of ratings: the rows before each day, and what users did on the day."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embeddings.vectors.item_vectors import Array
from trainer.generalization.label_randomization import write_table

SECONDS_PER_DAY = 86_400
LENGTH = 10
"""Number of the newest items of a history that a consumer reads."""
MIN_LENGTH = 3
"""Users who have taken fewer items are left out."""


class Log(NamedTuple):
    """Rows of a log, grouped by user and in each user's order: ``user``, ``item``, ``rating``, ``day`` [r].

    Days count from 1970-01-01.
    """

    user: Array
    item: Array
    rating: Array
    day: Array

    def before(self, day: int) -> Log:
        """Return the rows of earlier days."""
        return self.where(self.day < day)

    def where(self, chosen: Array) -> Log:
        """Return the rows where ``chosen``, bool [r], is true."""
        return Log(*(column[chosen] for column in self))


class Impressions(NamedTuple):
    """The next actions of b users; items are row numbers of the feature matrix.

    ``history`` int64 [b, LENGTH]: the items taken last, oldest first, padded with -1 in front; ``rated`` [b]: the mean
    of all ratings given before; ``shown`` int64 [b, 1 + c]: the item taken and c items that the user never takes in the
    log; ``rating`` [b]: the rating of the item taken.
    """

    history: Array
    rated: Array
    shown: Array
    rating: Array


def day_number(day: str) -> int:
    """Return the number of days from 1970-01-01 to an ISO date."""
    return datetime.date.fromisoformat(day).toordinal() - datetime.date(1970, 1, 1).toordinal()


def day_name(number: int) -> str:
    """Return the ISO date of a day's number."""
    return (datetime.date(1970, 1, 1) + datetime.timedelta(number)).isoformat()


def read_log(rows: Path) -> Log:
    """Return the log of ``rows`` (Parquet: user, item, rating, pos, timestamp in seconds).

    Rows without a timestamp are left out, since their day is not known.
    """
    table = pq.read_table(rows, columns=["user", "item", "rating", "pos", "timestamp"])
    table = table.filter(pc.is_valid(table["timestamp"]))
    user, item, rating, pos, seconds = (column.to_numpy() for column in table.columns)
    order = np.lexsort((pos, user))
    return Log(*(column[order] for column in (user, item, rating, seconds // SECONDS_PER_DAY)))


def write_rows_before(log: Log, day: int, path: Path) -> None:
    """Write the rows before a day unless the file exists: ``user``, ``item``, ``rating`` and their order ``pos``."""
    if path.exists():
        return
    past = log.before(day)
    columns = {"user": past.user, "item": past.item, "rating": past.rating, "pos": np.arange(len(past.user))}
    write_table(pa.table(columns), path)


def impressions(log: Log, ids: Array, days: range, num: int, num_others: int, seed: int) -> Impressions:
    """Return at most ``num`` rows of ``days`` as impressions, drawn by ``seed``.

    Only users who took at least MIN_LENGTH of the items ``ids`` [n] before count; ``ids`` are the items of the feature
    matrix in its order. Everything is read from ``log``, so a log that ends when a consumer was fitted hides all later
    rows from it.

    Raises:
        ValueError: there are none.
    """
    order = np.argsort(ids)
    places = np.minimum(np.searchsorted(ids, log.item, sorter=order), len(ids) - 1)
    log = log.where(ids[order[places]] == log.item)
    row = order[np.searchsorted(ids, log.item, sorter=order)]
    _, starts, user = np.unique(log.user, return_index=True, return_inverse=True)
    start = starts[user]
    at = np.arange(len(row))
    usable = np.flatnonzero((at - start >= MIN_LENGTH) & (log.day >= days.start) & (log.day < days.stop))
    if not len(usable):
        raise ValueError(f"nobody was asked from {day_name(days.start)} to {day_name(days.stop - 1)}: take other days")
    draw = np.random.Generator(np.random.Philox(seed))
    chosen = np.sort(draw.choice(usable, min(num, len(usable)), replace=False))
    back = chosen[:, None] - np.arange(LENGTH, 0, -1)
    given = np.concatenate([[0.0], np.cumsum(log.rating, dtype=np.float64)])
    taken = np.zeros((len(starts), len(ids)), dtype=bool)
    taken[user, row] = True
    return Impressions(
        np.where(back >= start[chosen, None], row[back], -1),
        (given[chosen] - given[start[chosen]]) / (chosen - start[chosen]),
        np.column_stack([row[chosen], _never_taken(taken, user[chosen], num_others, draw)]),
        log.rating[chosen].astype(np.float64),
    )


def _never_taken(taken: Array, users: Array, num: int, draw: np.random.Generator) -> Array:
    """Return random items int64 [b, num] that ``users`` [b] never took, by ``taken`` [u, n]; they may repeat."""
    if taken[users].all(axis=1).any():
        raise ValueError("a user has taken every item: there is nothing else to show")
    items = draw.integers(taken.shape[1], size=(len(users), num))
    while len(again := np.argwhere(taken[users[:, None], items])):
        items[again[:, 0], again[:, 1]] = draw.integers(taken.shape[1], size=len(again))
    return items
