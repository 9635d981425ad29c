"""Comparison of a candidate with the served version: the input of every check of the gate."""

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
    """Sample sizes and seed of the checks that draw a sample.

    Attributes:
        k: number of neighbours of ``knn_overlap``.
        num_queries: number of items whose neighbours are compared.
        num_corpus: largest number of items among which neighbours are searched.
    """

    seed: int = 0
    k: int = 10
    num_queries: int = 500
    num_corpus: int = 50_000


@dataclass(frozen=True)
class Shorter:
    """Length of a candidate's training window relative to those of the versions before it.

    Attributes:
        shares: length of the candidate's window in days over that of the previous version, of the version before it and
            so on; 1 where it is as long or longer, and for versions beyond the last entry.
        stands_for: number of items of the previous version that one new item replaces: 1 + (days left out) / (new days)
            for a shorter window, assuming that each day adds as many items as it removes. None without a new day.
    """

    shares: tuple[float, ...] = ()
    stands_for: float | None = 1.0

    @property
    def share(self) -> float:
        """Length of the candidate's window over that of the previous version, at most 1."""
        return self.shares[0] if self.shares else 1.0


MIN_EVIDENT = 30
"""Fewest evident shared items to measure without the others; with fewer, all shared items are measured."""
MIN_ROWS = 2
"""Fewest training rows, in both versions, for an item's norm to be judged; a single row is noise."""


@dataclass(frozen=True)
class Comparison:
    """An aligned candidate, not yet averaged, and the version that is served.

    Attributes:
        previous: the version that is served; None: the candidate is the first version.
        live: bool [n], items that count for ``coverage``.
        probes: documents of the probes that can read both (embeddings.refresh.probe), keyed by name.
        min_count: fewest training rows of an evident item; 0: every item is evident.
        anchor: the version that drift is counted from; None: no version before the previous one.
        metrics_before: metrics of the previous version from the time when it was the candidate.
        row_figures: figures of the rows that the candidate was trained on, keyed by name (``gate_checks.row_figures``).
        models: comparison of its model with the served one; None: they were not compared.

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
        """The previous version, for checks that need a previous version."""
        assert self.previous is not None
        return self.previous

    @cached_property
    def finite(self) -> Array:
        """Flags of the candidate's rows without NaN and infinity, bool [n]."""
        return self._flags[0]

    @cached_property
    def usable(self) -> Array:
        """Flags of the candidate's rows that have a direction, bool [n]: evidence, finite, not zero."""
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
        """Rows (of previous, of candidate) of the ids in both, with or without a vector."""
        return shared_rows(self.served.keys, self.candidate.keys)

    @cached_property
    def shared(self) -> tuple[Array, Array]:
        """Rows (of previous, of candidate) of the items with a new vector in each."""
        old, new = self.common
        both = self.usable[new] & self.served.renewed[old]
        return old[both], new[both]

    @cached_property
    def evident(self) -> tuple[Array, Array]:
        """Rows (of previous, of candidate) of the shared items with enough training rows in both.

        The vector of an item with one click is noise: two trainings agree on it no more than on a random direction.
        This noise would hide a movement of the other items, or look like a movement. All shared items are used if
        counts are unknown or fewer than ``MIN_EVIDENT`` items are evident.
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

        The counts are float64 [2, n]. Rows and counts are empty unless both versions have counts.
        """
        old, new = self.shared
        if self.served.counts is None or self.candidate.counts is None:
            return (old[:0], new[:0]), np.empty((2, 0))
        num_rows = np.stack([self.served.counts[old], self.candidate.counts[new]]).astype(np.float64)
        twice = num_rows.min(axis=0) >= MIN_ROWS
        return (old[twice], new[twice]), num_rows[:, twice]

    @property
    def all_evident(self) -> bool:
        """True if the evident items are all shared items, so that figures of both would be equal."""
        return len(self.evident[0]) == len(self.shared[0])

    @cached_property
    def renewed(self) -> Array:
        """Flags of the previous version's items with a usable vector in the candidate, bool [rows of previous]."""
        old, new = self.common
        renewed = np.zeros(len(self.served), dtype=np.bool_)
        renewed[old] = self.usable[new]
        return renewed

    @cached_property
    def generator(self) -> np.random.Generator:
        """Random numbers of the samples, from which checks draw in the order of the registry."""
        return np.random.Generator(np.random.Philox(self.sampling.seed))


def live_rows(items: ItemVectors) -> Array:
    """Flag the items that training saw, bool [n]: with a count, or with evidence where counts are unknown."""
    return items.evidence if items.counts is None else items.counts > 0


def share(mask: Array) -> float:
    """Return the share of True in ``mask``, NaN where it is empty."""
    return float(mask.mean()) if len(mask) else float("nan")


def ratio(part: Any, whole: Any) -> float:
    """Return part / whole, NaN for a whole of 0."""
    return float(part) / float(whole) if whole else float("nan")
