"""What the refreshes of a collection usually look like: the metrics of the versions that were published before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from embeddings.refresh.gate_checks.registry import limit_of
from embeddings.store import Collection, StoreError

NUM_REFRESHES = 14
"""Largest number of published refreshes whose metrics are remembered."""
MIN_REFRESHES = 5
"""Fewest published refreshes whose spread is taken for what is usual; with fewer it is assumed to be larger."""
EARLY = 2.5
"""Factor on the assumed spread while there are fewer than ``MIN_REFRESHES``."""
WIDTH = 4.0
"""Distance of a limit from the median, in standard deviations."""
_NORMAL = 1.4826
"""Standard deviation of normal values whose median absolute deviation is 1."""


@dataclass(frozen=True)
class Usual:
    """One metric of recent published refreshes.

    Attributes:
        median: its median.
        spread: its standard deviation, by the median absolute deviation.
        refreshes: number of refreshes.
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
        """Return the limit: ``WIDTH`` spreads from the median, towards the bad side.

        Args:
            least_spread: least standard deviation that is assumed.
            standard_error: of the candidate's own value.
            at_most: True where large values are bad.
        """
        early = EARLY if self.refreshes < MIN_REFRESHES else 1.0
        width = WIDTH * max(self.spread, early * least_spread, standard_error)
        return self.median + (width if at_most else -width)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def usual_metrics(collection: Collection, parent: str | None, model: str) -> dict[str, Usual]:
    """Return the usual values of each metric with rolling limits, over the refreshes that led to version ``parent``.

    A version that a rollback left behind is not among them, nor one of another model or generation.
    """
    values: dict[str, list[float]] = {}
    for manifest in _published(collection, parent, model):
        for name, value in (manifest.get("metrics") or {}).items():
            limit = limit_of(name)
            if limit is not None and limit.spread is not None:
                values.setdefault(name, []).append(float(value))
    return {name: Usual.of(found) for name, found in values.items()}


def _published(collection: Collection, version: str | None, model: str) -> Iterator[Mapping[str, Any]]:
    """Yield manifests of the parent, its parent and so on, newest first."""
    generation = None
    for _ in range(NUM_REFRESHES):
        if version is None:
            return
        try:
            manifest = collection.manifest(version)
        except StoreError:
            # Damaged or deleted: those before it are not known either.
            return
        generation = generation or manifest["anchor_generation"]
        if manifest["anchor_generation"] != generation or manifest.get("model", model) != model:
            return
        yield manifest
        version = manifest["parent"]
