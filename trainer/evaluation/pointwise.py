"""Figures of held-out rows that have one score each.

Rank 0 computes them from all ranks' rows, gathered; or, if there are too many rows, from their counts in pieces
(:mod:`trainer.metrics.streaming`). Both ways give the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from trainer.metrics.counts import Int64s
from trainer.metrics.intervals import bootstrap
from trainer.metrics.pointwise import CountsMetric, Resampled, Rows, RowsMetric
from trainer.metrics.registry import METRICS
from trainer.metrics.streaming import RankGroup
from trainer.spec import Intervals

GATHER_ROWS = 2_000_000
"""Most rows of a split that is gathered on rank 0 (docs/adr/0032 has the measurement)."""

Figures = dict[str, Any]


def gathered(names: Sequence[str], rows: Rows) -> Figures:
    """Return {name: value} of the metrics ``names``, computed from ``rows``, which are all ranks' rows."""
    return {name: METRICS[name].of_rows(rows) for name in names}


def intervals(metrics: Sequence[str], rows: Rows, asked: Intervals, seed: int) -> dict[str, tuple[float, float]]:
    """Return {name: (low, high)}, bootstrap intervals of metrics that have an interval; ``rows``: all ranks' rows."""
    if rows.any_nan:
        return {}
    resampled = {name: one for name in metrics if (one := METRICS[name].resampled(rows)) is not None}
    of_rows = {name: one for name, one in resampled.items() if one.num_units is None}
    settings: dict[str, Any] = {"replicates": asked.replicates, "seed": seed, "level": asked.level}
    bounds: dict[str, tuple[float, float]] = {}
    if of_rows and asked.by == "row":
        bounds = bootstrap(partial(_statistics, of_rows), len(rows), **settings)
    elif of_rows:
        unit = _units(rows.known_users)
        num_units = int(unit.max(initial=-1)) + 1
        bounds = bootstrap(lambda times: _statistics(of_rows, times[unit]), num_units, **settings)
    for name, one in resampled.items():
        if one.num_units is not None:
            bounds |= bootstrap(partial(_statistics, {name: one}), one.num_units, **settings)
    return bounds


def _statistics(resampled: dict[str, Resampled], times: Int64s) -> dict[str, float]:
    return {name: one.statistic(times) for name, one in resampled.items()}


def _units(users: npt.NDArray[np.int32]) -> Int64s:
    """Return each row's user as a number from 0; rows without a user all have different numbers."""
    known = users >= 0
    units = np.empty(len(users), np.int64)
    _, units[known] = np.unique(users[known], return_inverse=True)
    units[~known] = int(units[known].max(initial=-1)) + 1 + np.arange(int((~known).sum()))
    return units


def streamed(names: Sequence[str], rows: Rows, group: dist.ProcessGroup | None) -> Figures:
    """Return {name: value} of the metrics ``names`` over all ranks' rows; ``rows`` are this rank's. Collective.

    The values are valid on rank 0 only. ``group``: None if there is only one rank.
    """
    ranks = RankGroup(group)
    num_rows, num_nan = ranks.total([len(rows), int(rows.any_nan)])
    if num_nan or not num_rows:
        return {name: METRICS[name].nothing for name in names}
    counted = {name: one for name in names if isinstance(one := METRICS[name], CountsMetric)}
    sums = {name: metric.sums(int(num_rows)) for name, metric in counted.items()}
    for counts in ranks.pieces(rows) if counted else ():
        for one in sums.values():
            one.add(counts)
    figures: Figures = {name: metric.value(sums[name]) for name, metric in counted.items()}
    for name in names:
        if isinstance(metric := METRICS[name], RowsMetric):
            figures[name] = metric.streamed(rows, ranks)
    return figures
