"""One row optimizer for some rows of a table and another for the rest, by a number that each row keeps, its bucket.

With buckets of rows by how often they occur in training this is the ablation of adaptive regularization (Li and Lyu,
slides: AdamAR on buckets 1..k, AdamW on the others), or a decay of each bucket's own (Proposition 1). Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from embeddings.optim.base import RowOptimizer

MAX_BUCKET = 127
"""Buckets are kept as int8."""


@dataclass(frozen=True)
class ByBucket(RowOptimizer):
    """Let each row be trained by the optimizer of its bucket.

    They differ in their decay alone: their rule and state, and what they have in common of other settings, are one. So
    a row is trained as a table of its optimizer would train it, to the bit. A row whose bucket has no optimizer of its
    own is trained by the first one.

    Args:
        optimizers: the first, of buckets that have none, and others.
        of_bucket: for each of the others the buckets that it trains, from 0 to MAX_BUCKET, none of them twice.

    Raises:
        ValueError: optimizers that differ in more than decay, or buckets that are not such.

    Example:
        >>> from embeddings.optim import AdamAR, AdamW, ByBucket
        >>> optimizer = ByBucket.of(AdamAR(alpha=1e-4), (AdamW(weight_decay=0.1), (4, 5)))
        >>> [optimizer.number_of(bucket) for bucket in range(6)]  # which optimizer each bucket has
        [0, 0, 0, 0, 1, 1]
    """

    optimizers: tuple[RowOptimizer, ...] = ()
    of_bucket: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, first: RowOptimizer, *others: tuple[RowOptimizer, tuple[int, ...]]) -> ByBucket:
        """Return ``first`` with, for some buckets, each of ``others``."""
        optimizers, of_bucket = (first, *(one for one, _ in others)), tuple(buckets for _, buckets in others)
        return cls(
            first.learning_rate, optimizers, of_bucket, schedule=first.schedule, clip_row_norm=first.clip_row_norm
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [bucket for buckets in self.of_bucket for bucket in buckets]
        if len(named) != len(set(named)) or not all(0 <= bucket <= MAX_BUCKET for bucket in named):
            raise ValueError(f"buckets {named} must be numbers from 0 to {MAX_BUCKET}, each of one optimizer")
        if not self.optimizers or len(self.optimizers) != len(self.of_bucket) + 1:
            raise ValueError(
                f"{len(self.optimizers)} optimizers with buckets of {len(self.of_bucket)}: the first one needs none, "
                "each other one some; use ByBucket.of"
            )
        first = self.optimizers[0]
        for other in self.optimizers[1:]:
            mine, theirs = _shared(first), _shared(other)
            differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            if differ:
                raise ValueError(
                    f"{type(first).__name__} and {type(other).__name__} differ in {', '.join(differ)}: optimizers of "
                    "buckets may differ in their decay alone"
                )
        # What a group of tables asks of its optimizer before it knows a row.
        for name in ("rule", "state_names", "row_state_names", "keeps_mean_square"):
            object.__setattr__(self, name, getattr(first, name))

    def number_of(self, bucket: int) -> int:
        """Return which of the optimizers a bucket has."""
        return next((number for number, own in enumerate(self.of_bucket, 1) if bucket in own), 0)

    @property
    def numbers(self) -> np.ndarray:
        """Which of the optimizers each bucket has, int64 [MAX_BUCKET + 1]."""
        return np.array([self.number_of(bucket) for bucket in range(MAX_BUCKET + 1)])

    @property
    def idle_momentum(self) -> bool:
        return self.optimizers[0].idle_momentum

    @property
    def deferred_settings(self) -> tuple[str, ...]:
        """Names of the settings that a warm start may not change: those of any of them, and which buckets they have."""
        of_each = (name for one in self.optimizers for name in one.deferred_settings)
        return (*dict.fromkeys(of_each), "optimizers", "of_bucket")


_OF_DECAY = ("alpha", "decay", "epoch_steps", "weight_decay", "first_touch")


def _shared(optimizer: RowOptimizer) -> dict[str, Any]:
    """Return what optimizers of one table's rows have in common."""
    settings = {one.name: getattr(optimizer, one.name) for one in fields(optimizer) if one.name not in _OF_DECAY}
    return settings | {name: getattr(optimizer, name) for name in ("rule", "state_names", "row_state_names")}
