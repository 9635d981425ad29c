"""Days of clicks in a world whose items change: what refreshes are studied on."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]
Kind = Literal["steady", "switch"]
NUM_USERS, NUM_ITEMS, NEW_ITEMS, NUM_TOPICS, TASTES = 400, 800, 10, 16, 6
ROWS, CHOICES = 10_000, 25
EVENT, HIDDEN = 3, 0.6
"""Day of a switch, from which on that share of the first items is all but gone."""
FIRST_DAY = datetime.date(2026, 1, 1)


class World:
    """Users with tastes, items of topics; a user takes the likeliest of 25 items that popularity picks.

    Args:
        kind: ``steady``, or ``switch`` to other items on day ``EVENT``.
        seed: seed of everything drawn.
    """

    def __init__(self, kind: Kind, seed: int):
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.users = self.rng.standard_normal((NUM_USERS, TASTES))
        self.topics = self.rng.standard_normal((NUM_TOPICS, TASTES))
        self.places = self._places(NUM_ITEMS)
        self.popularity = self.rng.lognormal(size=NUM_ITEMS)

    def day(self, number: int) -> pa.Table:
        """Return the rows of a day; days come one after another."""
        self.places = np.vstack([self.places, self._places(NEW_ITEMS)])
        self.popularity = np.append(self.popularity, self.rng.lognormal(size=NEW_ITEMS))
        weights = self.popularity.copy()
        if self.kind == "switch" and number >= EVENT:
            weights[: int(NUM_ITEMS * HIDDEN)] *= 0.001
        user = self.rng.integers(0, NUM_USERS, ROWS)
        seen = self.rng.choice(len(weights), (ROWS, CHOICES), p=weights / weights.sum())
        liking = np.einsum("nt,nct->nc", self.users[user], self.places[seen]) * 3 / np.sqrt(TASTES)
        item = seen[np.arange(ROWS), (liking + self.rng.gumbel(size=seen.shape)).argmax(axis=1)]
        clicks, dates = np.ones(ROWS, np.int64), [date_of(number)] * ROWS
        return pa.table({"user": user, "item": item, "click": clicks, "date": dates})

    def _places(self, num_items: int) -> Array:
        topics = self.topics[self.rng.integers(0, NUM_TOPICS, num_items)]
        return np.asarray(topics + 0.4 * self.rng.standard_normal((num_items, TASTES)))


def date_of(day: int) -> str:
    """Return the date of a day, YYYY-MM-DD."""
    return (FIRST_DAY + datetime.timedelta(day)).isoformat()
