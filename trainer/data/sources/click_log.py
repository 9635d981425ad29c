"""A generated click log with long-tailed ids, item clusters and the true probability of every click. Torch-free.

``evenkeel generate OUT`` writes ``OUT/date=YYYY-MM-DD/part-00000.parquet`` with the columns:

===========  ===========================================================================================
user, item   int64 ids; Zipf-distributed popularity
query        int64 id; long-tailed, most queries occur once or twice
context      int64, one of 24 placements
timestamp    int64, seconds since 1970-01-01, ascending within the day
click        int8, drawn from ``probability``
probability  float64, the true P(click): the best possible predictor
cluster      int64, the item's true cluster, which its learned vector should reflect
===========  ===========================================================================================

logit P(click) = bias + user activity + item quality + query effect + context effect + taste(user, cluster of item);
a user likes two of the clusters. The queries' long tail causes one-epoch overfitting: each query's effect is real but
shows in a few noisy labels. So dense Adam gains in the first epoch and memorises from the second on. A tenth of the
items appears only after the first day. Every value is a function of (seed, day, row), the same on every machine.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing
from trainer.data.columns.hashing import Int64s, derive_key, random_words, unit_interval

Floats = npt.NDArray[np.float64]

CHUNK_ROWS = 1 << 20
FIRST_DAY = datetime.date(2026, 1, 1)
NUM_CONTEXTS = 24
USER_BASE, ITEM_BASE, QUERY_BASE = 1_000_000, 5_000_000, 10_000_000
_WORLD, _ROWS = 31, 32


@dataclass(frozen=True)
class DailyLog:
    """A generated log with equally many rows on each day, give or take one, ascending in time."""

    num_rows: int = 200_000
    num_days: int = 10
    seed: int = 0
    rows_per_user: float = 100.0

    def __post_init__(self) -> None:
        if self.num_days < 1 or self.num_rows < self.num_days:
            raise ValueError(f"{self.num_rows} rows do not fill {self.num_days} days: give at least one row per day")

    @property
    def num_users(self) -> int:
        return max(8, int(self.num_rows / self.rows_per_user))

    def rows_of_day(self, day: int) -> int:
        """Return the number of rows of day ``day`` (from 0)."""
        return self.num_rows * (day + 1) // self.num_days - self.num_rows * day // self.num_days

    def chunks(self, day: int) -> Iterator[Int64s]:
        """Yield the numbers of a day's rows, as many at a time as are drawn at once."""
        count = self.rows_of_day(day)
        for start in range(0, count, CHUNK_ROWS):
            yield np.arange(start, min(start + CHUNK_ROWS, count))

    def times(self, day: int, index: Int64s) -> Int64s:
        """Return the times, in seconds since 1970, of the rows with these numbers in their day."""
        midnight = (FIRST_DAY - datetime.date(1970, 1, 1)).days + day
        return midnight * 86_400 + index * 86_400 // self.rows_of_day(day)

    def uniform(self, stream: tuple[int, ...], index: Int64s) -> Floats:
        """Return a number in [0, 1) for each index, as a function of the seed and the stream."""
        return unit_interval(random_words(derive_key(self.seed, *stream), index))


@dataclass(frozen=True)
class ClickLog(DailyLog):
    """The model that generates the log. The numbers of users, items and queries follow from ``num_rows``."""

    rows_per_item: float = 200.0
    rows_per_query: float = 2.5
    num_clusters: int = 12
    user_exponent: float = 0.4
    item_exponent: float = 0.6
    query_exponent: float = 0.4
    user_spread: float = 0.5
    item_spread: float = 0.4
    query_spread: float = 0.6
    context_spread: float = 0.6
    taste: float = 3.0
    targeted: float = 0.7
    bias: float = -2.0

    @property
    def num_items(self) -> int:
        return max(2 * self.num_clusters, int(self.num_rows / self.rows_per_item))

    @property
    def num_queries(self) -> int:
        return max(8, int(self.num_rows / self.rows_per_query))

    def day_table(self, day: int) -> pa.Table:
        """Return a table of the rows of day ``day`` (from 0)."""
        return pa.concat_tables([self._rows(day, index) for index in self.chunks(day)])

    def _rows(self, day: int, index: Int64s) -> pa.Table:
        def uniform(stream: int) -> Floats:
            return self.uniform((_ROWS, day, stream), index)

        users = np.searchsorted(self._user_cdf, uniform(0), side="right")
        items = self._draw_items(day, users, uniform(1), uniform(2), uniform(3))
        queries = np.searchsorted(self._query_cdf, uniform(6), side="right")
        contexts = (uniform(4) * NUM_CONTEXTS).astype(np.int64)
        probability = 1.0 / (1.0 + np.exp(-self.logits(users, items, queries, contexts)))
        return pa.table(
            {
                "user": users + USER_BASE,
                "item": items + ITEM_BASE,
                "query": queries + QUERY_BASE,
                "context": contexts,
                "timestamp": self.times(day, index),
                "click": (uniform(5) < probability).astype(np.int8),
                "probability": probability,
                "cluster": self.item_clusters[items],
            }
        )

    def logits(self, users: Int64s, items: Int64s, queries: Int64s, contexts: Int64s) -> Floats:
        """Return the true log-odds of a click, float64 [n], for user, item, query and context numbers, int64 [n]."""
        clusters = self.item_clusters[items]
        likes = (self._tastes[users] == clusters[:, None]).any(axis=1)
        # Centred, so that the bias keeps its meaning: a user likes about 2 of the clusters.
        affinity = self.taste * (likes - 2.0 / self.num_clusters)
        of_users, of_items, of_contexts, of_queries = self._effects
        return self.bias + (of_users[users] + of_items[items] + of_queries[queries]) + of_contexts[contexts] + affinity

    def _draw_items(self, day: int, users: Int64s, which: Floats, within: Floats, choice: Floats) -> Int64s:
        """Draw an item for each user by popularity; for the targeted share, from one of the user's two clusters."""
        weights = np.where(self._birth_days <= day, self._item_weights, 0.0)
        by_cluster = np.argsort(self.item_clusters, kind="stable")
        cdf = np.concatenate([[0.0], np.cumsum(weights[by_cluster])])
        bounds = np.searchsorted(self.item_clusters[by_cluster], np.arange(self.num_clusters + 1))
        cluster = self._tastes[users, (choice * 2).astype(np.int64)]
        targeted = which < self.targeted
        low = np.where(targeted, cdf[bounds[cluster]], 0.0)
        high = np.where(targeted, cdf[bounds[cluster + 1]], cdf[-1])
        position = np.searchsorted(cdf, low + within * (high - low), side="right") - 1
        return by_cluster[np.minimum(position, self.num_items - 1)]

    def _world(self, stream: int, count: int) -> Floats:
        return self.uniform((_WORLD, stream), np.arange(count))

    def _normal(self, stream: int, count: int) -> Floats:
        return normal(self._world(stream, count), self._world(stream + 1, count))

    @cached_property
    def item_clusters(self) -> Int64s:
        """Return the cluster of each item, int64 [items], drawn at random; the first items cover all clusters."""
        clusters = (self._world(0, self.num_items) * self.num_clusters).astype(np.int64)
        clusters[: self.num_clusters] = np.arange(self.num_clusters)
        return clusters

    @cached_property
    def _birth_days(self) -> Int64s:
        """Return the day from which on each item appears, int64 [items]."""
        # The day is 0 for nine tenths of the items, and always for the first num_clusters, the most popular.
        late = self._world(1, self.num_items) < 0.1
        late[: self.num_clusters] = False
        day = 1 + (self._world(2, self.num_items) * max(1, self.num_days - 1)).astype(np.int64)
        return np.where(late, day, 0)

    @cached_property
    def _item_weights(self) -> Floats:
        return np.arange(1, self.num_items + 1, dtype=np.float64) ** -self.item_exponent

    @cached_property
    def _user_cdf(self) -> Floats:
        return zipf_cdf(self.num_users, self.user_exponent)

    @cached_property
    def _query_cdf(self) -> Floats:
        return zipf_cdf(self.num_queries, self.query_exponent)

    @cached_property
    def _tastes(self) -> Int64s:
        """Return the two clusters that each user likes, int64 [users, 2]."""
        first = (self._world(3, self.num_users) * self.num_clusters).astype(np.int64)
        step = 1 + (self._world(4, self.num_users) * (self.num_clusters - 1)).astype(np.int64)
        return np.stack([first, (first + step) % self.num_clusters], axis=1)

    @cached_property
    def _effects(self) -> tuple[Floats, Floats, Floats, Floats]:
        return (
            self.user_spread * self._normal(5, self.num_users),
            self.item_spread * self._normal(7, self.num_items),
            self.context_spread * self._normal(9, NUM_CONTEXTS),
            self.query_spread * self._normal(11, self.num_queries),
        )


def normal(first: Floats, second: Floats) -> Floats:
    """Return standard normal numbers from two uniform ones each, by the method of Box and Muller."""
    radius: Floats = np.sqrt(-2.0 * np.log1p(-first))
    return radius * np.cos(2.0 * np.pi * second)


def zipf_cdf(count: int, exponent: float) -> Floats:
    """Return the running sums of rank^-exponent over ``count`` ranks, as shares of the whole."""
    cdf: Floats = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    return cdf / cdf[-1]


def generate(log: ClickLog, directory: Path | str) -> list[Path]:
    """Write the log's days under ``directory`` and return their files' paths.

    Each day's file appears complete or not at all, and replaces an older file of that day.
    """
    return [write_day(log.day_table(day), Path(directory), day) for day in range(log.num_days)]


def write_day(table: pa.Table, directory: Path, day: int) -> Path:
    """Write a day's rows in a folder of its date, which appears complete; return the file's path."""
    folder = directory / f"date={FIRST_DAY + datetime.timedelta(days=day)}"
    directory.mkdir(parents=True, exist_ok=True)
    with appearing(folder, durable=False) as work:
        work.mkdir(parents=True)
        pq.write_table(table, work / "part-00000.parquet", row_group_size=1 << 17, compression="zstd")
        shutil.rmtree(folder, ignore_errors=True)
    return folder / "part-00000.parquet"
