"""A candidate beside the version that is served: what every check of the gate measures from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from embeddings.refresh.model_comparison import ModelComparison
from embeddings.vectors.item_vectors import Array, ItemVectors, chunks, shared_rows


@dataclass(frozen=True)
class Sampling:
    """What the checks that sample draw.

    Attributes:
        k: the number of neighbours of ``knn_overlap``.
        num_queries: items whose neighbours are compared.
        num_corpus: the most items among which neighbours are sought.
    """

    seed: int = 0
    k: int = 10
    num_queries: int = 500
    num_corpus: int = 50_000


@dataclass(frozen=True)
class Shorter:
    """How much shorter a candidate's window is than those of the versions before it.

    Attributes:
        shares: which share of the days of the previous version, of the one before it and so on the candidate was
            trained on; 1 where it has as many or more, and of versions beyond the last.
        stands_for: in a shorter window, how many items that went one stands for that came. As many come on each of its
            days that the previous version had not as went on each of those and of the days that are left out. None
            where it has no day of its own.
    """

    shares: tuple[float, ...] = ()
    stands_for: float | None = 1.0

    @property
    def share(self) -> float:
        """Of the previous version's days."""
        return self.shares[0] if self.shares else 1.0


MIN_EVIDENT = 30
"""Fewest evident shared items to measure alone; with fewer, all shared items are measured."""
MIN_ROWS = 2
"""Fewest training rows, in both versions, for an item's norm to be judged; a single row is noise."""


@dataclass(frozen=True)
class Comparison:
    """An aligned candidate, not yet averaged, and the version that is served.

    Args:
        previous: the version that is served; None: the candidate is the first one, which needs none.
        candidate: the candidate.
        live: bool [n], items of which ``coverage`` is a share.
        probes: documents of the probes that can read both (embeddings.refresh.probe), by name.
        sampling: what is drawn of them.
        min_count: rows of training from which on an item is evident; 0: every item is.
        anchor: the version that drift is counted from; None: there is none before the previous one.
        metrics_before: what was measured of the previous version when it was the candidate.
        shorter: how much shorter its window is than those before it.
        row_figures: figures of the rows that it was trained on, by name (``gate_checks.row_figures``).
        models: its model beside the served one; None: they were not compared.

    Raises:
        ValueError: vectors of different dims.
    """

    previous: ItemVectors | None
    candidate: ItemVectors
    live: Array
    probes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sampling: Sampling = Sampling()
    min_count: int = 0
    anchor: ItemVectors | None = None
    metrics_before: Mapping[str, float] = field(default_factory=dict)
    shorter: Shorter = Shorter()
    row_figures: Mapping[str, float | None] = field(default_factory=dict)
    models: ModelComparison | None = None

    def __post_init__(self) -> None:
        if self.previous is not None and self.previous.dim != self.candidate.dim:
            raise ValueError(
                f"the previous version has {self.previous.dim} coordinates, the candidate {self.candidate.dim}"
            )

    @property
    def served(self) -> ItemVectors:
        """The previous version, where there is one: for checks that need it."""
        assert self.previous is not None
        return self.previous

    @cached_property
    def finite(self) -> Array:
        """Which rows of the candidate have neither NaN nor infinity, bool [n]."""
        return self._flags[0]

    @cached_property
    def usable(self) -> Array:
        """Which rows of the candidate have a direction, bool [n]: evidence, finite, not zero."""
        return self.candidate.evidence & self.finite & self._flags[1]

    @cached_property
    def _flags(self) -> tuple[Array, Array]:
        finite = np.empty(len(self.candidate), dtype=np.bool_)
        nonzero = np.empty(len(self.candidate), dtype=np.bool_)
        for part in chunks(len(self.candidate)):
            rows = self.candidate.vectors[part]
            finite[part] = np.isfinite(rows).all(axis=1)
            nonzero[part] = rows.any(axis=1)
        return finite, nonzero

    @cached_property
    def common(self) -> tuple[Array, Array]:
        """Rows (of previous, of candidate) of the ids that both have, with a vector or without."""
        return shared_rows(self.served.keys, self.candidate.keys)

    @cached_property
    def shared(self) -> tuple[Array, Array]:
        """Rows (of previous, of candidate) of the items that both have found."""
        old, new = self.common
        both = self.usable[new] & self.served.renewed[old]
        return old[both], new[both]

    @cached_property
    def evident(self) -> tuple[Array, Array]:
        """Rows (of previous, of candidate) of the shared items that both know from enough rows of training.

        What an item of one click is given is chance: two trainings agree on it no more than on a random direction, so
        it would hide, or look like, what became of the others. All shared items where counts are unknown, or where
        fewer than ``MIN_EVIDENT`` are evident.
        """
        old, new = self.shared
        known = [counts[rows] for counts, rows in ((self.served.counts, old), (self.candidate.counts, new))
                 if counts is not None]  # fmt: skip
        if not known or not self.min_count:
            return old, new
        enough = np.minimum.reduce(known) >= self.min_count
        return (old[enough], new[enough]) if int(enough.sum()) >= MIN_EVIDENT else (old, new)

    @cached_property
    def counted(self) -> tuple[tuple[Array, Array], Array]:
        """Rows (of previous, of candidate) of the shared items with ``MIN_ROWS`` in both, and their counts.

        The counts are float64 [2, n]. No items where counts are unknown.
        """
        old, new = self.shared
        if self.served.counts is None or self.candidate.counts is None:
            return (old[:0], new[:0]), np.empty((2, 0))
        num_rows = np.stack([self.served.counts[old], self.candidate.counts[new]]).astype(np.float64)
        twice = num_rows.min(axis=0) >= MIN_ROWS
        return (old[twice], new[twice]), num_rows[:, twice]

    @property
    def all_evident(self) -> bool:
        """Whether every shared item is measured."""
        return len(self.evident[0]) == len(self.shared[0])

    def generator_of(self, purpose: int) -> np.random.Generator:
        """Return random numbers beside those of ``generator``, from which further draws would move what follows."""
        return np.random.Generator(np.random.Philox([self.sampling.seed, purpose]))

    @cached_property
    def renewed(self) -> Array:
        """Which items of the previous version the candidate has a usable vector for, bool [rows of previous]."""
        old, new = self.common
        renewed = np.zeros(len(self.served), dtype=np.bool_)
        renewed[old] = self.usable[new]
        return renewed

    @cached_property
    def generator(self) -> np.random.Generator:
        """Random numbers of the samples: checks draw from it one after another, in the order of the registry."""
        return np.random.Generator(np.random.Philox(self.sampling.seed))


def live_rows(items: ItemVectors) -> Array:
    """Flag the items that training saw, bool [n]: with a count, or with evidence where counts are unknown."""
    live: Array = items.evidence if items.counts is None else items.counts > 0
    return live


def share(mask: Array) -> float:
    """Return the share of True in ``mask``, NaN where it is empty."""
    return float(mask.mean()) if len(mask) else float("nan")


def ratio(part: Any, whole: Any) -> float:
    """Return part / whole, NaN for a whole of 0."""
    return float(part) / float(whole) if whole else float("nan")
