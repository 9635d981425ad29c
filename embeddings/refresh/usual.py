"""Usual values of a collection's metrics: median and spread over the versions that were published before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embeddings.refresh.gate_checks.registry import limit_of, subject_of
from embeddings.refresh.record import RefreshRecord
from embeddings.refresh.windows import WINDOW
from embeddings.store import Collection, StoreError

NUM_REFRESHES = 14
"""Largest number of refreshes whose metrics are remembered; windows that end on the same day count as one."""
NUM_VERSIONS = 28 * NUM_REFRESHES
"""Largest number of versions that are read: 14 days of hourly versions, and a margin."""
MIN_REFRESHES = 5
"""Fewest refreshes whose measured spread is used; with fewer refreshes a larger spread is assumed."""
EARLY = 2.5
"""Factor on the assumed spread while there are fewer than ``MIN_REFRESHES``."""
WIDTH = 4.0
"""Distance of a limit from the median, in standard deviations."""
_ACROSS_GENERATIONS = frozenset({"rows", "model"})
"""Subjects of metrics that a new generation does not change."""
_NORMAL = 1.4826
"""Standard deviation of normal values whose median absolute deviation is 1."""


@dataclass(frozen=True)
class Usual:
    """One metric of recent published refreshes.

    Attributes:
        spread: its standard deviation, by the median absolute deviation.
        refreshes: number of refreshes, where all refreshes of one day count as one.
    """

    median: float
    spread: float
    refreshes: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Usual:
        """Return the summary of one metric's values."""
        median = float(np.median(values))
        return cls(median, _NORMAL * float(np.median(np.abs(np.asarray(values) - median))), len(values))

    def limit(self, least_spread: float, standard_error: float, at_most: bool) -> float:
        """Return the limit: ``WIDTH`` spreads from the median, towards the bad side (up if ``at_most``).

        The spread is at least ``least_spread`` and the ``standard_error`` of the candidate's own value.
        """
        early = EARLY if self.refreshes < MIN_REFRESHES else 1.0
        width = WIDTH * max(self.spread, early * least_spread, standard_error)
        return self.median + (width if at_most else -width)


def usual_metrics(collection: Collection, parent: str | None, model: str) -> dict[str, Usual]:
    """Return the usual values of each metric with rolling limits, over the refreshes that led to version ``parent``.

    Versions that were rolled back, and those of another model or generation, do not count; figures of the rows and of
    the model continue across generations. Refreshes of one day share most of their rows, and only the first of a day
    drops the oldest rows. So they count once, with the worst value of each metric.
    """
    days: dict[str, dict[str, float]] = {}
    for day, manifest, subjects in _published(collection, parent, model):
        for name, value in RefreshRecord.of(manifest).metrics.items():
            limit = limit_of(name)
            if limit is not None and limit.spread is not None and (subjects is None or subject_of(name) in subjects):
                values = days.setdefault(name, {})
                worst = max if limit.at_most else min
                values[day] = worst(float(value), values.get(day, float(value)))
    return {name: Usual.of(list(values.values())) for name, values in days.items()}


def _published(
    collection: Collection, version: str | None, model: str
) -> Iterator[tuple[str, Mapping[str, Any], frozenset[str] | None]]:
    """Yield (day, manifest, subjects of metrics that count; None: all) of the parent, its parent and so on."""
    generation, days, subjects = None, set(), None
    for _ in range(NUM_VERSIONS):
        if version is None:
            return
        try:
            manifest = collection.manifest(version)
        except StoreError:
            # Damaged or deleted, so the versions before it are unknown too.
            return
        generation = generation or manifest["anchor_generation"]
        record = RefreshRecord.of(manifest)
        if record.model not in (None, model):
            return
        if manifest["anchor_generation"] != generation:
            subjects = _ACROSS_GENERATIONS
        window = (record.lineage or {}).get(WINDOW)
        day = version if window is None else str(window["last"])
        days.add(day)
        if len(days) > NUM_REFRESHES:
            return
        yield day, manifest, subjects
        if record.released and any(subject_of(name) == "rows" for name in record.released["failed"]):
            # The rows have changed permanently, so versions before this one are not comparable.
            return
        version = manifest["parent"]
