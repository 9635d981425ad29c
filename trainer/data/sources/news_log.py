"""A generated click log like a news site's: items live for a day or two, and users' interests change. Torch-free.

``evenkeel generate OUT --churn`` writes ``OUT/date=YYYY-MM-DD/part-00000.parquet`` with a row for each click:

===========  ===========================================================================================
user, item   int64 ids; Zipf-distributed popularity; new items every day
timestamp    int64, seconds since 1970-01-01, ascending within the day
click        int8, always 1: items that were shown and not clicked are not in the log
topic        int64, the topic that the click was drawn for
===========  ===========================================================================================

The command also writes the true vectors behind the clicks to ``OUT/_truth``, a folder that readers of the log skip:

===========================================  ===========================================================
items.parquet                                item, first_day, last_day (from 0), weight (popularity),
                                             topic (its largest), vector (float64 [topics], sums to 1)
users/date=YYYY-MM-DD/part-00000.parquet     user, vector (float64 [topics]): the interests of the day
===========================================  ===========================================================

The model has topics t: P(item | user, day) = sum_t P(t | user, day) P(item | t, day). P(item i | t, day) is
proportional to weight_i vector_it over the items alive on the day. So ``vector`` is all that clicks can reveal about an
item besides its popularity. From its first day on, an item survives each day with probability 1 - 1 /
``lifetime_days``; on average the number of items is constant. P(. | user, day) is the softmax of a user's leaning plus
the day's news, both stationary autoregressions over days. Every value is a function of (seed, day, row).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing
from trainer.data.columns.hashing import Int64s
from trainer.data.sources.click_log import ITEM_BASE, USER_BASE, DailyLog, Floats, normal, write_day, zipf_cdf

TRUTH = "_truth"
_WORLD, _ROWS, _LEANINGS, _NEWS = 41, 42, 43, 44


@dataclass(frozen=True)
class NewsLog(DailyLog):
    """The model behind the log. The numbers of users and items follow from ``num_rows`` and ``num_days``.

    Attributes:
        rows_per_user: mean number of clicks of a user, over all days.
        rows_per_birth: number of clicks of a day divided by the number of items born on it.
        num_topics: number of topics, the dimension of the true vectors.
        lifetime_days: mean number of days that an item lives, at least 1.
        item_exponent: exponent of items' popularity: weight = rank^-item_exponent among the items born on one day.
        user_exponent: exponent of users' activity: a user's share of clicks is proportional to rank^-user_exponent.
        main_share: the part of an item's vector that lies on its main topic; the rest lies on a second topic.
        interest_spread: standard deviation of a user's leaning for a topic, in log-odds.
        interest_memory: correlation of a leaning with the day before.
        news_spread: standard deviation of a day's news, log-odds that are added for all users.
        news_memory: correlation of the news with that of the day before.
    """

    num_days: int = 14
    rows_per_user: float = 250.0
    rows_per_birth: float = 3.0
    num_topics: int = 12
    lifetime_days: float = 2.0
    item_exponent: float = 1.0
    user_exponent: float = 0.4
    main_share: float = 0.8
    interest_spread: float = 3.0
    interest_memory: float = 0.95
    news_spread: float = 0.7
    news_memory: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lifetime_days < 1:
            raise ValueError(f"lifetime_days is {self.lifetime_days}: an item lives for a day at least")

    @property
    def births(self) -> int:
        """Number of items that are born on each day."""
        return max(2 * self.num_topics, int(self.num_rows / self.num_days / self.rows_per_birth))

    @property
    def num_items(self) -> int:
        """Number of items of all days, including those born before the first day."""
        return len(self.first_days)

    def day_table(self, day: int) -> pa.Table:
        """Return a table of the clicks of day ``day`` (from 0), in the order of their times."""
        topics_of_users = np.cumsum(self.interests(day), axis=1)
        # The items alive on the day, [n], and running sums of weight x share, [topics, n].
        alive = np.flatnonzero((self.first_days <= day) & (day <= self.last_days))
        cdf = np.cumsum(self.item_vectors[alive].T * self.item_weights[alive], axis=1)
        return pa.concat_tables([self._rows(day, index, topics_of_users, alive, cdf) for index in self.chunks(day)])

    def _rows(self, day: int, index: Int64s, topics_of_users: Floats, alive: Int64s, cdf: Floats) -> pa.Table:
        def uniform(stream: int) -> Floats:
            return self.uniform((_ROWS, day, stream), index)

        users = np.searchsorted(self._user_cdf, uniform(0), side="right")
        topics = np.minimum((topics_of_users[users] <= uniform(1)[:, None]).sum(axis=1), self.num_topics - 1)
        within = uniform(2)
        items = np.empty(len(index), dtype=np.int64)
        for topic in range(self.num_topics):
            chosen = topics == topic
            position = np.searchsorted(cdf[topic], within[chosen] * cdf[topic, -1], side="right")
            items[chosen] = alive[np.minimum(position, len(alive) - 1)]
        return pa.table(
            {
                "user": users + USER_BASE,
                "item": items + ITEM_BASE,
                "timestamp": self.times(day, index),
                "click": np.ones(len(index), dtype=np.int8),
                "topic": topics,
            }
        )

    def interests(self, day: int) -> Floats:
        """Return P(topic | user) on a day, float64 [users, topics]."""
        leaning = self._autoregression(_LEANINGS, day, self.num_users, self.interest_memory)
        news = self._autoregression(_NEWS, day, 1, self.news_memory)
        odds = np.exp(self.interest_spread * leaning + self.news_spread * news)
        return odds / odds.sum(axis=1, keepdims=True)

    def _autoregression(self, stream: int, day: int, count: int, memory: float) -> Floats:
        """Return x_day [count, topics] of x_d = memory x_{d-1} + sqrt(1 - memory^2) e_d, each x standard normal."""
        values = self._normal((stream, 0), count * self.num_topics)
        for later in range(1, day + 1):
            fresh = self._normal((stream, later), count * self.num_topics)
            values = memory * values + np.sqrt(1.0 - memory**2) * fresh
        return values.reshape(count, self.num_topics)

    @cached_property
    def item_vectors(self) -> Floats:
        """Return the items' shares of topics, float64 [items, topics]: two shares of each item are not zero."""
        main = (self._uniform((_WORLD, 0), self.num_items) * self.num_topics).astype(np.int64)
        step = 1 + (self._uniform((_WORLD, 1), self.num_items) * (self.num_topics - 1)).astype(np.int64)
        vectors = np.zeros((self.num_items, self.num_topics))
        rows = np.arange(self.num_items)
        vectors[rows, main] = self.main_share
        vectors[rows, (main + step) % self.num_topics] = 1.0 - self.main_share
        return vectors

    @cached_property
    def first_days(self) -> Int64s:
        """Return the day on which each item is born, int64 [items]; items born before the log have day 0."""
        survival = 1.0 - 1.0 / self.lifetime_days
        before = round(self.births * survival / (1.0 - survival))
        born: Int64s = np.concatenate(
            [np.zeros(before, dtype=np.int64), np.repeat(np.arange(self.num_days), self.births)]
        )
        return born

    @cached_property
    def last_days(self) -> Int64s:
        """Return the last day on which each item is alive, int64 [items]."""
        survival = 1.0 - 1.0 / self.lifetime_days
        if survival == 0.0:
            return self.first_days
        draw = self._uniform((_WORLD, 2), self.num_items)
        # P(lives on for n days more) = survival^n, whatever its age.
        return self.first_days + np.floor(np.log1p(-draw) / np.log(survival)).astype(np.int64)

    @cached_property
    def item_weights(self) -> Floats:
        """Return the items' popularities, float64 [items]: rank^-exponent, ranked at random among the same birthday."""
        order = self._uniform((_WORLD, 3), self.num_items)
        before = self.num_items - self.births * self.num_days
        weights = np.empty(self.num_items)
        bounds = [0, *range(before, self.num_items + 1, self.births)]
        for start, stop in itertools.pairwise(bounds):
            ranks = np.empty(stop - start)
            ranks[np.argsort(order[start:stop], kind="stable")] = np.arange(1, stop - start + 1)
            weights[start:stop] = ranks**-self.item_exponent
        return weights

    @cached_property
    def _user_cdf(self) -> Floats:
        return zipf_cdf(self.num_users, self.user_exponent)

    def _uniform(self, stream: tuple[int, ...], count: int) -> Floats:
        return self.uniform(stream, np.arange(count))

    def _normal(self, stream: tuple[int, ...], count: int) -> Floats:
        return normal(self._uniform((*stream, 0), count), self._uniform((*stream, 1), count))

    def truth_of_items(self) -> pa.Table:
        """Return a table with the columns item, first_day, last_day, weight, topic and vector, a row for each item."""
        return pa.table(
            {
                "item": np.arange(self.num_items) + ITEM_BASE,
                "first_day": self.first_days,
                "last_day": self.last_days,
                "weight": self.item_weights,
                "topic": self.item_vectors.argmax(axis=1),
                "vector": _lists(self.item_vectors),
            }
        )

    def truth_of_users(self, day: int) -> pa.Table:
        """Return a table with the columns user and vector (the interests of the day), a row for each user."""
        return pa.table({"user": np.arange(self.num_users) + USER_BASE, "vector": _lists(self.interests(day))})


def _lists(matrix: Floats) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.ravel()), matrix.shape[1])


def generate_news(log: NewsLog, directory: Path | str) -> list[Path]:
    """Write the log's days and its true vectors under ``directory``, replacing older files.

    Each day's file appears complete or not at all.

    Returns:
        The paths of the days' files.
    """
    directory = Path(directory)
    truth = directory / TRUTH
    truth.mkdir(parents=True, exist_ok=True)
    with appearing(truth / "items.parquet", durable=False) as work:
        pq.write_table(log.truth_of_items(), work, compression="zstd")
    written = []
    for day in range(log.num_days):
        write_day(log.truth_of_users(day), truth / "users", day)
        written.append(write_day(log.day_table(day), directory, day))
    return written
